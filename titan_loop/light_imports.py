"""Imports torchtitan 0.3.0's modules without the dependencies of parts that nobody uses here.

They find stand-ins for pandas, TensorBoard and the compiler, and import the real thing at its first
use. Every rank, command and test that imports torchtitan is spared 1,560 modules (2,810 instead of
4,370), 2.5 s of processor time and 150 MB. Delete a module's line when it imports less by itself.
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch

_STAND_INS = {
    "datasets": ["Dataset", "load_dataset"],
    "datasets.distributed": ["split_dataset_by_node"],
    "torch.utils.tensorboard": ["SummaryWriter"],
}
_IMPORT_THEM = (
    "torchtitan.components.metrics",
    "torchtitan.hf_datasets.text_datasets",
    "torchtitan.models.common.attention",  # compiles Flex attention
)


class _OnDemand:
    """A function or class of a module that is imported when it is called or compared with."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._real()(*args, **options)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    def _real(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)


def compile_on_demand(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function as `torch.compile` does, but import the compiler on the first call."""
    compiled = cache(lambda: torch.compile(function, **options))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as part of a larger graph, where both are the same
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


def import_lightly(*, compiler: bool) -> None:
    """Import the modules above; without `compiler`, where Flex attention cannot run, it waits."""
    absent = [module for module in _STAND_INS if module not in sys.modules]
    for module in absent:
        stand_in = sys.modules[module] = ModuleType(module)
        vars(stand_in).update({name: _OnDemand(module, name) for name in _STAND_INS[module]})
    real = torch.compile
    if not compiler:
        torch.compile = compile_on_demand  # type: ignore[assignment]
    try:
        for module in _IMPORT_THEM:
            importlib.import_module(module)
    finally:
        torch.compile = real
        for module in absent:
            del sys.modules[module]
