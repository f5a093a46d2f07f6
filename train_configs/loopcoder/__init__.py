"""LoopCoder's two loops beside a plain loop and layers that are visited once, in miniature."""
