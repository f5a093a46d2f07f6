"""The operations that a training step spends its time in, and the bound of each.

A profiled step is split by operation; matrix products are listed by shape. The least time of an
operation is the larger of two: its FLOPs over the rate of a large product, and its bytes over the
rate of a large copy. Both rates are measured here, in the dtype that layers compute in. The larger
one is the operation's bound, and `reached` is the least time over the time taken. Bytes count the
inputs, and the largest input once more for the result; so `reached` above 1 means that data came
from a cache. Causal attention counts half its square. Kernels written by the compiler do not report
shapes, so these columns are empty: its element-wise work and reductions are bound by memory; the
bound of its templates (FlexAttention, products) is unknown, "?".
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import seconds_of
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile
from torchtitan.tools import utils as titan_utils
from training_step import device, matmul_flops

_LARGE = 4096  # of a product whose rate is the device's
_COPIED_BYTES = 1 << 29
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
_ATTENTION = "scaled_dot_product"
_GENERATED = ("triton_poi", "triton_red", "triton_per")  # element-wise work, reductions
_TEMPLATE = "flex_attention"
_BACKWARD_OVER_FORWARD = 2.5  # products of attention: five, where its forward has two


@dataclass
class Work:
    """What one kind of operation took in a step: seconds, calls, FLOPs and bytes."""

    seconds: float = 0.0
    calls: int = 0
    flops: float = 0.0
    bytes: float = 0.0


def print_operations(step: Callable[[], object], most: int) -> None:
    """Profile one call of `step` and list the `most` operations that take longest."""
    work = _profiled(step)
    size = min(_LARGE, 1024) if device().type == "cpu" else _LARGE
    flop_rate, byte_rate = matmul_flops(size, size, size), _copy_bytes_per_second()
    total = sum(entry.seconds for entry in work.values())
    print(
        f"\nproducts {flop_rate / 1e12:.2f} TFLOP/s, copies {byte_rate / 1e9:.0f} GB/s; "
        f"all operations {1e3 * total:.1f} ms"
    )
    print("operation | calls | ms | of all | TFLOP/s | GB/s | bound by | reached")
    ranked = sorted(work.items(), key=lambda item: item[1].seconds, reverse=True)
    for name, entry in ranked[:most]:
        compute, memory = entry.flops / flop_rate, entry.bytes / byte_rate
        columns = ["-", "-", "memory" if _moves_memory(name) else "?", "-"]
        if entry.bytes:
            columns = [
                f"{entry.flops / entry.seconds / 1e12:.3f}",
                f"{entry.bytes / entry.seconds / 1e9:.1f}",
                "compute" if compute > memory else "memory",
                f"{max(compute, memory) / entry.seconds:.2f}",
            ]
        print(
            f"{name} | {entry.calls} | {1e3 * entry.seconds:.2f} | {entry.seconds / total:.1%} | "
            + " | ".join(columns)
        )


def _profiled(step: Callable[[], object]) -> dict[str, Work]:
    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        titan_utils.device_module.synchronize()
    work: dict[str, Work] = defaultdict(Work)
    for event in profiler.events() or []:
        if event.device_type != DeviceType.CPU:  # a kernel, counted with what launched it
            continue
        seconds = 1e-6 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        if not seconds:
            continue
        shapes = [shape for shape in event.input_shapes or [] if shape]
        product = event.name in _PRODUCTS
        entry = work[f"{event.name} {_product_shape(shapes)}" if product else event.name]
        entry.seconds += seconds
        entry.calls += 1
        entry.flops += _flops(event.name, shapes)
        entry.bytes += _bytes(event.name, shapes)
    return work


def _moves_memory(name: str) -> bool:
    """Return whether an operation without shapes does element-wise work or reductions."""
    return name.startswith(_GENERATED) and _TEMPLATE not in name


def _product_shape(shapes: list[list[int]]) -> str:
    left, right = shapes[-2:]
    return "×".join(map(str, [*left, right[-1]]))


def _flops(name: str, shapes: list[list[int]]) -> float:
    if name in _PRODUCTS:
        left, right = shapes[-2:]
        return 2.0 * math.prod(left) * right[-1]
    if _ATTENTION in name and len(shapes) >= 3:
        backward = "backward" in name
        *rows, width = shapes[1] if backward else shapes[0]
        keys = shapes[2][-2] if backward else shapes[1][-2]
        square = 4.0 * math.prod(rows) * keys * width / 2
        return square * (_BACKWARD_OVER_FORWARD if backward else 1.0)
    return 0.0


def _bytes(name: str, shapes: list[list[int]]) -> float:
    if not shapes or not name.startswith("aten::"):
        return 0.0
    sizes = [math.prod(shape) for shape in shapes]
    result = max(sizes)
    if name in _PRODUCTS:
        left, right = shapes[-2:]
        result = math.prod(left[:-1]) * right[-1]
    return (sum(sizes) + result) * (2 if device().type == "cuda" else 4)


def _copy_bytes_per_second(repeats: int = 7) -> float:
    source = torch.ones(_COPIED_BYTES // 4, device=device())
    target = torch.empty_like(source)
    seconds = sorted(seconds_of(lambda: target.copy_(source)) for _ in range(repeats))
    return 2 * _COPIED_BYTES / seconds[len(seconds) // 2]
