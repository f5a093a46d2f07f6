"""titan_loop: pretraining of looped language models on torchtitan's primitives.

`titan_loop.load` opens a saved model in Python (`titan_loop/interactive.py`).
"""

import importlib
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "load":  # imports torch, which most commands do without
        return importlib.import_module("titan_loop.interactive").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
