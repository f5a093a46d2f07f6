"""The loops that shipped, Inkling's passes and LoopCoder's two loops, beside a plain loop."""
