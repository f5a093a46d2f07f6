"""Differences between two checkpoints, found with two tensors in memory.

A tensor's difference is max |a − b|, in float64. Two NaN in one place are equal; NaN and a number
differ by infinity.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader

_NOT_COMPARED = {"files", "format_version", "sha256"}  # they describe the files, not the content


def differences(a: CheckpointReader, b: CheckpointReader) -> Iterator[str]:
    """Yield a line for everything that differs, as it is found: manifest, then entries by key."""
    first, second = (
        {name: value for name, value in each.manifest.items() if name not in _NOT_COMPARED}
        for each in (a, b)
    )
    yield from _value_differences("manifest", first, second)
    tensors = {*a.tensor_keys()}, {*b.tensor_keys()}
    keys = {*a.keys()}, {*b.keys()}
    for key in sorted(keys[0] | keys[1]):
        if key not in keys[0] or key not in keys[1]:
            yield f"{key}: only in {'A' if key in keys[0] else 'B'}"
        elif (key in tensors[0]) != (key in tensors[1]):
            yield f"{key}: a tensor only in {'A' if key in tensors[0] else 'B'}"
        elif key not in tensors[0]:
            yield from _value_differences(key, a.read_object(key), b.read_object(key))
        elif a.shape(key) != b.shape(key):
            yield f"{key}: shape {[*a.shape(key)]} | {[*b.shape(key)]}"
        else:
            if a.dtype(key) != b.dtype(key):
                yield f"{key}: {a.dtype(key)} | {b.dtype(key)}"
            if (most := largest_difference(a.read(key), b.read(key))) > 0:
                yield f"{key}: largest difference {most:.3g}"


def _value_differences(name: str, first: Any, second: Any) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            inner = f"{name}.{key}" if name != "manifest" else f"{name} {key}"
            yield from _value_differences(inner, first.get(key), second.get(key))
    elif first != second:
        yield f"{name}: {first!r} | {second!r}"


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two real tensors of one shape."""
    exact = torch.float64 if a.is_floating_point() or b.is_floating_point() else torch.int64
    a, b = a.to(exact), b.to(exact)
    # Subtracting equal infinities, or two NaN, gives NaN.
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(apart.masked_fill(same, 0.0).max()) if not same.all() else 0.0
