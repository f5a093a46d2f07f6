"""The weighted mean of committed checkpoints of one architecture becomes a new checkpoint.

    w = Σ_i a_i w_i / Σ_i a_i        a_i = weights[i]

Sum and quotient are taken in float64, and the result is rounded to the tensor's own dtype. (Shares
a_i / Σ a_i would have rounding errors of their own, which show where the mean lies half-way between
two float32 numbers.) The mean has no optimiser state, since moments belong to the weights they were
measured at.

Source: Wortsman et al. 2022, "Model soups", arXiv:2203.05482, §2 (the uniform soup, with weights).
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX
from titan_loop.checkpoint.manifest import new_content, read_manifest, reference
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.errors import UserError

_OBJECT = "an object"


def merge_checkpoints(
    sources: Sequence[Path], target: Path, *, weights: Sequence[float] = ()
) -> None:
    """Write and commit the weighted mean of committed checkpoints, as a checkpoint of step 0.

    The largest tensor is in memory twice in float64 and once as it is saved. R, the architecture
    and the position in the data come from the first checkpoint; `lineage.merged` has the reference
    of every one and its share a_i / Σ a_i as `weight`. Empty `weights` are equal ones.
    """
    factors = scaled_weights(weights, len(sources))
    manifests = [read_manifest(source) for source in sources]
    architecture, *others = (manifest["trainer"]["architecture"] for manifest in manifests)
    for source, other in zip(sources[1:], others, strict=True):
        otherwise = "merge checkpoints of one architecture"
        check_architecture(other, architecture, holder=str(source), otherwise=otherwise)
    readers = [CheckpointReader(source) for source in sources]
    first, *others = readers
    forms = _forms(first)
    for other in others:
        _check_forms(first, other, forms)
    entries: dict[str, Any] = {}
    for name, form in forms.items():
        if form != _OBJECT and first.dtype(name).is_floating_point:
            produce = partial(_mean, readers, factors, name)
            entries[name] = LazyTensor(first.shape(name), first.dtype(name), produce)
        else:
            entries[name] = _shared(readers, name, is_object=form == _OBJECT)
    merged = [
        {**reference(source), "weight": factor / sum(factors)}
        for source, factor in zip(sources, factors, strict=True)
    ]
    content = new_content(
        0,
        {**manifests[0]["trainer"], "step": 0, "tokens": 0},
        stage_end=True,
        data=manifests[0]["data"],
        lineage={"parent": None, "merged": merged},
    )
    write_checkpoint(target, entries, content)


def scaled_weights(weights: Sequence[float], count: int) -> list[float]:
    """Return the weights of `count` checkpoints times a power of 2: the largest is in [1, 2).

    Scaling is exact and keeps products far from overflow. Raises `UserError` for unfit weights.
    """
    if count < 2:
        raise UserError(f"a merge needs at least two checkpoints, not {count}; name another one")
    weights = weights or [1.0] * count
    given = " ".join(f"{weight:g}" for weight in weights)
    if len(weights) != count:
        raise UserError(
            f"weights={given} has {len(weights)} values for {count} checkpoints; give one for "
            "each, or none for equal weights"
        )
    if not all(0 <= weight < math.inf for weight in weights) or max(weights) == 0:
        raise UserError(f"weights={given} must be finite and at least 0, with a positive sum")
    exponent = math.frexp(max(weights))[1] - 1
    return [math.ldexp(weight, -exponent) for weight in weights]


def _forms(reader: CheckpointReader) -> dict[str, str]:
    """Return dtype and shape, as a phrase, of every entry that is not the optimiser's."""
    keys, tensors = reader.keys(), set(reader.tensor_keys())
    return {
        key: f"{reader.dtype(key)} {[*reader.shape(key)]}" if key in tensors else _OBJECT
        for key in keys
        if not key.startswith(OPTIMIZER_PREFIX)
    }


def _check_forms(first: CheckpointReader, other: CheckpointReader, forms: dict[str, str]) -> None:
    others = _forms(other)
    for name in sorted({*forms, *others}):
        here, there = forms.get(name, "missing"), others.get(name, "missing")
        if here != there:
            raise UserError(
                f"{name} is {there} in {other.checkpoint}, but {here} in {first.checkpoint}; merge "
                "checkpoints with the same tensors"
            )


def _shared(readers: Sequence[CheckpointReader], name: str, *, is_object: bool) -> Any:
    values = [each.read_object(name) if is_object else each.read(name) for each in readers]
    for reader, value in zip(readers, values, strict=True):
        if not (value == values[0] if is_object else torch.equal(value, values[0])):
            raise UserError(
                f"{name} has no mean and differs between {readers[0].checkpoint} and "
                f"{reader.checkpoint}; merge checkpoints that agree in it"
            )
    return values[0]


def _mean(readers: Sequence[CheckpointReader], factors: Sequence[float], name: str) -> Tensor:
    # Adding 0 · w would turn -0 into 0: a single non-zero weight must copy its checkpoint exactly.
    parts = [(reader, a) for reader, a in zip(readers, factors, strict=True) if a]
    (first, factor), *others = parts
    total = first.read(name).double().mul_(factor)
    for reader, factor in others:
        total.add_(reader.read(name).double().mul_(factor))
    return total.div_(sum(factors)).to(readers[0].dtype(name))
