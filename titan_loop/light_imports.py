"""Imports of torchtitan 0.3.0's modules without the dependencies of parts that nobody uses here.

    import of a module ─► _LighterImports ─► stand-ins for pandas, TensorBoard, the compiler
                                             └─ the real thing is imported at its first use

A start opens about a thousand files less. Delete a module's line when it imports less by itself.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

import torch


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


@contextmanager
def _on_demand(names: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Let imports find stand-ins for modules, unless the real ones are there already."""
    if names.keys() & sys.modules.keys():
        yield
        return
    for module, inside in names.items():
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update({name: _OnDemand(module, name) for name in inside})
    try:
        yield
    finally:
        for module in names:
            del sys.modules[module]


def compile_on_demand(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function as `torch.compile` does, but import the compiler on the first call."""
    compiled = cache(lambda: torch.compile(function, **options))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as part of a larger graph, where both are the same
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


@contextmanager
def _compiler_on_demand() -> Iterator[None]:
    """Let a module compile functions while it is imported, but not import the compiler."""
    real = torch.compile
    torch.compile = compile_on_demand  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


_TENSORBOARD = {"torch.utils.tensorboard": ["SummaryWriter"]}
_DATASETS = {
    "datasets": ["Dataset", "load_dataset"],
    "datasets.distributed": ["split_dataset_by_node"],
}
_LIGHTER: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torchtitan.components.metrics": partial(_on_demand, _TENSORBOARD),  # 350 files
    # The trainer imports its validator, Hugging Face's loaders, and so pandas: 0.9 s.
    "torchtitan.hf_datasets.text_datasets": partial(_on_demand, _DATASETS),
}


def import_lightly(*, compiler: bool) -> None:
    """Import the modules above without their dependencies, from now on in this process.

    Without `compiler`, where Flex attention cannot run, it waits for a first use, too (0.9 s).
    """
    if not compiler:
        _LIGHTER["torchtitan.models.common.attention"] = _compiler_on_demand
    if not any(isinstance(finder, _LighterImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LighterImports())


class _LighterLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _LIGHTER[module.__name__]():
            super().exec_module(module)


class _LighterImports(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _LIGHTER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _LighterLoader(fullname, spec.origin)
        return spec
