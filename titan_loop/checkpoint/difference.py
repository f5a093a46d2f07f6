"""Differences between two checkpoints, found with two tensors in memory.

    largest absolute difference    max |a − b|                   over a tensor, in float64
    largest relative difference    max |a − b| / max(|a|, |b|),  0 where both are 0

Two NaN in one place are equal; NaN and a number differ by infinity.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader

_CHUNK_ELEMENTS = 2**20
_NOT_COMPARED = {"files", "format_version", "sha256"}  # they describe the files, not the content


def differences(a: CheckpointReader, b: CheckpointReader) -> Iterator[str]:
    """Yield a line for everything that differs, as it is found: manifest, then entries by key."""
    first, second = (
        {name: value for name, value in each.manifest.items() if name not in _NOT_COMPARED}
        for each in (a, b)
    )
    yield from _manifest_differences(first, second)
    tensors = {*a.tensor_keys()}, {*b.tensor_keys()}
    keys = {*a.keys()}, {*b.keys()}
    for key in sorted(keys[0] | keys[1]):
        if key not in keys[0] or key not in keys[1]:
            yield f"{key}: only in {'A' if key in keys[0] else 'B'}"
        elif (key in tensors[0]) != (key in tensors[1]):
            yield f"{key}: a tensor only in {'A' if key in tensors[0] else 'B'}"
        elif key in tensors[0]:
            yield from _tensor_differences(a, b, key)
        elif (values := (a.read_object(key), b.read_object(key)))[0] != values[1]:
            yield f"{key}: {values[0]!r} | {values[1]!r}"


def _manifest_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "manifest "
) -> Iterator[str]:
    for name in sorted({*a, *b}):
        first, second = a.get(name), b.get(name)
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _manifest_differences(first, second, f"{prefix}{name}.")
        elif first != second:
            yield f"{prefix}{name}: {first!r} | {second!r}"


def _tensor_differences(a: CheckpointReader, b: CheckpointReader, key: str) -> Iterator[str]:
    if a.shape(key) != b.shape(key):
        yield f"{key}: shape {[*a.shape(key)]} | {[*b.shape(key)]}"
        return
    if a.dtype(key) != b.dtype(key):
        yield f"{key}: {a.dtype(key)} | {b.dtype(key)}"
    absolute, relative = largest_differences(a.read(key), b.read(key))
    if absolute > 0:
        yield f"{key}: largest difference {absolute:.3g}, relative {relative:.3g}"


def largest_differences(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest absolute and relative difference of two real tensors of one shape."""
    absolute = relative = 0.0
    exact = torch.float64 if a.is_floating_point() or b.is_floating_point() else torch.int64
    for left, right in zip(
        a.reshape(-1).split(_CHUNK_ELEMENTS), b.reshape(-1).split(_CHUNK_ELEMENTS), strict=True
    ):
        left, right = left.to(exact), right.to(exact)
        # Subtracting equal infinities, or two NaN, gives NaN.
        same = (left == right) | (left.isnan() & right.isnan())
        if same.all():  # also for an empty tensor
            continue
        difference = _nan_is_infinite((left - right).abs().double()).masked_fill(same, 0.0)
        size = torch.maximum(left.abs(), right.abs()).double()
        quotient = _nan_is_infinite(difference / size).masked_fill(same, 0.0)
        absolute = max(absolute, difference.max().item())
        relative = max(relative, quotient.max().item())
    return absolute, relative


def _nan_is_infinite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=torch.inf, posinf=torch.inf)
