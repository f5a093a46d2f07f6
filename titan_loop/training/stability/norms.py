"""The report of a measured step: a record of `norms.jsonl`, a line of the log, warnings.

A record has, besides `step` and `tokens`,

    state_rms         rows of layers: the root mean square of the state after each layer; row 0 is
                      of the layers outside the loop, row r of recurrent step r
    state_gradient    the same for the norm of the loss's gradient with respect to that state
    weight, gradient, update
                      by layer or module: norms of the weights, of their gradient before clipping,
                      and of what the step changed in them

Numbers that are not finite, or of visits that never happened, are null.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_loop.training.stability.states import OUTSIDE, gradient_norm, root_mean_square
from titan_loop.training.stability.weights import WeightNorms

GROWTH = 10.0
"""How much larger a layer's state may be in the last recurrent step than in the first before that
is warned of. With a norm after every step the ratio is near 1; without one it grows with R."""


def norms_record(
    *, step: int, tokens: int, recurrent_steps: int, sums: Tensor, elements: int, of: WeightNorms
) -> dict[str, Any]:
    """Return the record of one step; waits for the device.

    Args:
        step: The training step.
        tokens: Global tokens consumed after it.
        recurrent_steps: R of the step; later rows are left out.
        sums: From `StateNorms.reduce`.
        elements: Elements of one state of the global batch.
        of: The norms of the weights.
    """
    states = torch.stack([root_mean_square(sums), gradient_norm(sums, elements)])
    rms, gradient = states[:, : recurrent_steps + 1].tolist()
    named = {
        name: dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
        for name, norms in of._asdict().items()
    }
    return {
        "step": step,
        "tokens": tokens,
        "state_rms": rms,
        "state_gradient": gradient,
        **named,
    }


def norms_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line for the log."""
    rms, update = record["state_rms"], record["update"]
    relative = {name: update[name] / max(size, 1e-30) for name, size in record["weight"].items()}
    moved, gradient = max(relative, key=relative.__getitem__), record["gradient"]
    steepest = max(gradient, key=gradient.__getitem__)
    return (
        f"norms at step {record['step']}: states {_largest(rms[1]):.3g} after recurrent step 1, "
        f"{_largest(rms[-1]):.3g} after {len(rms) - 1}; largest gradient {gradient[steepest]:.3g} "
        f"({part_name(steepest)}); largest update {relative[moved]:.2g} of its weights "
        f"({part_name(moved)})"
    )


def growth_warning(rms: Sequence[Sequence[float]]) -> str | None:
    """Return one line if states grow with depth more than `GROWTH`, else None.

    Args:
        rms: `state_rms` of a record.
    """
    first, last = rms[OUTSIDE + 1], rms[-1]
    if len(rms) < 3:
        return None
    ratios = [b / a if a > 0 else math.nan for a, b in zip(first, last, strict=True)]
    layer = max(range(len(ratios)), key=lambda i: -1.0 if math.isnan(ratios[i]) else ratios[i])
    if not ratios[layer] > GROWTH:
        return None
    return (
        f"states grow with depth: layer {layer} returns {first[layer]:.3g} in recurrent step 1 and "
        f"{last[layer]:.3g} in step {len(rms) - 1}; use fewer recurrent steps, a norm after every "
        "step, or a lower learning rate"
    )


def part_name(part: str) -> str:
    """Return what a part of the model is called in a sentence."""
    return f"layer {part}" if part.isdecimal() else part


def _largest(row: Sequence[float]) -> float:
    return max((value for value in row if not math.isnan(value)), default=math.nan)
