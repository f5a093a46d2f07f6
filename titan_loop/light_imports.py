"""Imports of torchtitan 0.3.0's modules without the dependencies of parts that nobody uses here.

    import of a module ─► _LighterImports ─► stand-ins for pandas, TensorBoard, the compiler
                                             └─ the real thing is imported at its first use

A start opens about a thousand files less. Delete a module's line when it imports less by itself.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

import torch


@contextmanager
def _datasets_on_demand() -> Iterator[None]:
    """Let a module import names of `datasets` that are looked up when they are used.

    torchtitan's trainer imports its validator, its Hugging Face loaders, and so `datasets` with
    pandas: 0.9 s at every start, for classes nobody builds here.
    """

    class DatasetType(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, importlib.import_module("datasets").Dataset)

    package, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    vars(package).update(
        Dataset=DatasetType("Dataset", (), {}), load_dataset=_on_demand("datasets", "load_dataset")
    )
    vars(distributed).update(
        split_dataset_by_node=_on_demand("datasets.distributed", "split_dataset_by_node")
    )
    with _standing_in({"datasets": package, "datasets.distributed": distributed}):
        yield


@contextmanager
def _tensorboard_on_demand() -> Iterator[None]:
    """Let a module import TensorBoard's writer, which is loaded when one is made: 350 files."""
    name = "torch.utils.tensorboard"
    stand_in = ModuleType(name)
    vars(stand_in)["SummaryWriter"] = _on_demand(name, "SummaryWriter")
    with _standing_in({name: stand_in}):
        yield


def _on_demand(module: str, name: str) -> Callable[..., Any]:
    return lambda *args, **options: getattr(importlib.import_module(module), name)(*args, **options)


@contextmanager
def _standing_in(stand_ins: Mapping[str, ModuleType]) -> Iterator[None]:
    """Let imports find other modules, unless the real ones are there already."""
    if stand_ins.keys() & sys.modules.keys():
        yield
        return
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


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
    """Let a module compile functions while it is imported, but not import the compiler: 0.9 s."""
    real = torch.compile
    torch.compile = compile_on_demand  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


_LIGHTER: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torchtitan.components.metrics": _tensorboard_on_demand,
    "torchtitan.hf_datasets.text_datasets": _datasets_on_demand,
}


def import_lightly(*, compiler: bool) -> None:
    """Import the modules above without their dependencies, from now on in this process.

    Args:
        compiler: Whether Flex attention may run; elsewhere its compiler waits for a first use.
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
