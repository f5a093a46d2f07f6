"""Counts a step's memory and collectives, below autograd, FSDP, compiled graphs and DTensor.

torch's own tracker of FSDP's memory hooks into every module, which fails on layers compiled as a
full graph, and it stops at the second micro-batch. This meter counts storages instead: all that
were made and are still referred to, at their present size.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}
"""Collectives that count, by the name of their operator. All-reduces outside the backward pass, and
functional ones, do not count: they sum scalars, or the softmax of tensor-parallel ranks."""


@dataclass(slots=True)
class Moved:
    """Collectives of one kind, and the bytes that this rank receives in a ring of n ranks.

    That is (n − 1)/n of the whole for a gather or a reduce-scatter, twice that for an all-reduce,
    and the other ranks' parts in an all-to-all.
    """

    count: int = 0
    received_bytes: float = 0.0


def plus(moved: Mapping[str, Moved], more: Mapping[str, Moved], times: int) -> dict[str, Moved]:
    """Return `moved` plus `times` the collectives of the same kinds in `more`."""
    return {
        kind: Moved(
            one.count + times * other.count, one.received_bytes + times * other.received_bytes
        )
        for kind, one in moved.items()
        for other in [more.get(kind, Moved())]
    }


class StepMeter(TorchDispatchMode):
    """Measures the operators of its block that run on fake tensors of `fake_mode`.

    Tensors of other modes, such as a traced graph's, do not count. `live_bytes` is the size of all
    live storages; `peak_bytes` and `moved` (collectives by kind) begin anew at `reset`.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let layers be compiled in the block."""
        return True

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.moved: dict[str, Moved] = defaultdict(Moved)
        self._fake_mode = fake_mode
        self._sizes: dict[int, int] = {}
        self._paused = False

    def reset(self) -> None:
        """Start anew: the peak is the present number of bytes, and no collective has run."""
        self.peak_bytes = self.live_bytes
        self.moved = defaultdict(Moved)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the storages and collectives of the block."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> "StepMeter":
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set_size(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls again with its local tensors
        result = func(*args, **(kwargs or {}))
        if self._paused or active_fake_mode() is not self._fake_mode:
            return result
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._forget, storage._cdata)
                    self._set_size(storage)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, result)
        return result

    def _set_size(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.live_bytes += size - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, storage: int) -> None:
        self.live_bytes -= self._sizes.pop(storage)

    def _count(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.split("::")[1]
        kind = KINDS.get(name)
        if kind is None or (kind == "all-reduce" and torch._C._current_graph_task_id() == -1):
            return  # -1: not in the backward pass
        if kind == "all-reduce":
            (tensor,) = args[0]
            ranks = dist.ProcessGroup.unbox(args[1]).size()
            received = 2 * tensor.nbytes * (1 - 1 / ranks)
        elif name == "all_to_all_single":
            sizes, group = args[1], _resolve_process_group(args[3])
            received = result.nbytes * (1 - sizes[group.rank()] / max(1, sum(sizes)))
        elif kind == "all-to-all":
            output, group, sizes = args[0], dist.ProcessGroup.unbox(args[2]), args[3]
            received = output.nbytes - sizes[group.rank()] * output.itemsize
        else:
            sides = args[:2] if func.namespace == "c10d" else (args[0], result)
            whole = max(side.nbytes for side in sides)
            received = whole - min(side.nbytes for side in sides)
        self.moved[kind].count += 1
        self.moved[kind].received_bytes += received
