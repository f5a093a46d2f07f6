"""titan_loop: pretraining of looped language models on torchtitan's primitives."""

__version__ = "0.1.0"
