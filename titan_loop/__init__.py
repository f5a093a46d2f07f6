"""titan_loop: pretraining of looped language models on torchtitan's primitives."""

__version__ = "0.2.0.dev0"
