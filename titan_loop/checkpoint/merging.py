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


def merge_checkpoints(
    sources: Sequence[Path], target: Path, *, weights: Sequence[float] = ()
) -> None:
    """Write and commit the weighted mean of committed checkpoints, as a checkpoint of step 0.

    The largest tensor is in memory twice in float64 and once as it is saved. R, the architecture
    and the position in the data come from the first checkpoint; `lineage.merged` has the reference
    of every one and its share a_i / Σ a_i as `weight`. Empty `weights` are equal ones.
    """
    factors = checked_weights(weights, len(sources))
    manifests = [read_manifest(source) for source in sources]
    architecture, *others = (manifest["trainer"]["architecture"] for manifest in manifests)
    for source, other in zip(sources[1:], others, strict=True):
        otherwise = "merge checkpoints of one architecture"
        check_architecture(other, architecture, holder=str(source), otherwise=otherwise)
    readers = [CheckpointReader(source) for source in sources]
    entries: dict[str, Any] = {}
    for name in _model_keys(readers):
        shape, dtype = readers[0].shape(name), readers[0].dtype(name)
        entries[name] = LazyTensor(shape, dtype, partial(_mean, readers, factors, name))
        if not dtype.is_floating_point:
            entries[name], *others = (reader.read(name) for reader in readers)
            if not all(torch.equal(entries[name], other) for other in others):
                raise UserError(f"{name} has no mean; merge checkpoints that agree in it")
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


def checked_weights(weights: Sequence[float], count: int) -> Sequence[float]:
    """Return the weights of `count` checkpoints, equal by default; `UserError` for unfit ones."""
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
    return weights


def _model_keys(readers: Sequence[CheckpointReader]) -> list[str]:
    """Return the keys of the model's tensors, which all checkpoints must have alike."""
    forms = [
        {
            key: f"{reader.dtype(key)} {[*reader.shape(key)]}"
            for key in reader.tensor_keys()
            if not key.startswith(OPTIMIZER_PREFIX)
        }
        for reader in readers
    ]
    for reader, other in zip(readers, forms, strict=True):
        for name in sorted({*forms[0], *other}):
            here, there = (form.get(name, "missing") for form in (forms[0], other))
            if here != there:
                raise UserError(
                    f"{name} is {there} in {reader.checkpoint}, but {here} in "
                    f"{readers[0].checkpoint}; merge checkpoints with the same tensors"
                )
    return list(forms[0])


def _mean(readers: Sequence[CheckpointReader], factors: Sequence[float], name: str) -> Tensor:
    # Adding 0 · w would turn -0 into 0: a single non-zero weight must copy its checkpoint exactly.
    parts = [(reader, a) for reader, a in zip(readers, factors, strict=True) if a]
    (first, factor), *others = parts
    total = first.read(name).double().mul_(factor)
    for reader, factor in others:
        total.add_(reader.read(name).double().mul_(factor))
    return total.div_(sum(factors)).to(readers[0].dtype(name))
