"""The report of a measured step: a record in `norms.jsonl`, a line in the log, and warnings.

README.md lists the keys of a record.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from titan_loop.ranks import warn_together
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.kept_records import append_or_keep
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.stability.states import (
    OUTSIDE,
    StateNorms,
    gradient_norm,
    root_mean_square,
)
from titan_loop.training.verdict import StepVerdict

logger = logging.getLogger(__name__)

GROWTH = 10.0
"""Ratio of a layer's state in the last recurrent step to the first above which a warning is logged.
With a norm after every step the ratio is near 1; without one it grows with R."""


class WeightNorms:
    """Norms by part of the model: "0", "1", … for layers, else a top-level module's name.

    Create it before clipping and `finish` it after the update: meanwhile it holds one more copy of
    this rank's weights. Collective; the values stay on the device. A gradient that did not arrive
    and the update of a skipped step count as 0.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = parts_of(model)
        self._before = {
            name: [p.detach().clone() for p in part] for name, part in self._parts.items()
        }
        self.gradient = {
            name: _norm([p.grad if p.grad is not None else torch.zeros_like(p) for p in part])
            for name, part in self._parts.items()
        }
        self.weight = {name: _norm(weights) for name, weights in self._before.items()}
        self.update: dict[str, Tensor] = {}

    @torch.no_grad()
    def finish(self) -> None:
        """Measure the update and drop the copies."""
        for name, part in self._parts.items():
            old = self._before.pop(name)
            self.update[name] = _norm([p - q for p, q in zip(part, old, strict=True)])


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters by layer number or top-level module."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first, second, *_ = [*name.split("."), ""]
            parts.setdefault(second if first == "layers" else first, []).append(parameter)
    return parts


def _norm(tensors: list[Tensor]) -> Tensor:
    norm = get_total_norm([tensor.detach() for tensor in tensors])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class NormsLog(Callback):
    """Measures every `interval`-th step, and writes it to `norms.jsonl` and the log.

    `states` must measure these steps, too. `window_elements` is L x D, one window's state.
    """

    def __init__(
        self, interval: int, states: StateNorms, window_elements: int, run: RunDirectory
    ) -> None:
        self._interval, self._states, self._run = interval, states, run
        self._window_elements = window_elements
        self._weights: WeightNorms | None = None
        self._warned = False

    def on_gradients(self, trainer: TrainingState) -> None:
        """Measure weights and gradients."""
        if trainer.step % self._interval == 0:
            self._weights = WeightNorms(trainer.model)

    def on_update(self, trainer: TrainingState, verdict: StepVerdict) -> None:
        """Measure the update."""
        if self._weights is not None:
            self._weights.finish()

    def on_step_end(self, trainer: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Write the record of a measured step; waits for the device."""
        if self._weights is None:
            return
        record = norms_record(
            step=trainer.step,
            tokens=trainer.tokens,
            recurrent_steps=trainer.plan.recurrent_steps,
            sums=self._states.sums,
            elements=trainer.plan.windows * self._window_elements,
            of=self._weights,
        )
        self._weights = None
        warning = growth_warning(record["state_rms"])
        if dist.get_rank() == 0:
            append_or_keep(self._run.norms_jsonl, record)
            logger.info("%s", norms_line(record))
        if warning is not None and not self._warned:
            warn_together(logger, "step %d: %s", trainer.step, warning)
        self._warned = warning is not None


def norms_record(
    *, step: int, tokens: int, recurrent_steps: int, sums: Tensor, elements: int, of: WeightNorms
) -> dict[str, Any]:
    """Return the record of one step; waits for the device.

    `sums` are from `StateNorms`, of states that have `elements` elements in the global batch; rows
    after `recurrent_steps` are left out. `of` must be finished.
    """
    states = torch.stack([root_mean_square(sums), gradient_norm(sums, elements)])
    rms, gradient = states[:, : recurrent_steps + 1].tolist()
    named = {
        name: dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
        for name, norms in (("gradient", of.gradient), ("weight", of.weight), ("update", of.update))
    }
    return {"step": step, "tokens": tokens, "state_rms": rms, "state_gradient": gradient, **named}


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
    """Return a warning if a record's `state_rms` grows with depth more than `GROWTH`, else None."""
    if len(rms) < 3:
        return None
    first, last = rms[OUTSIDE + 1], rms[-1]
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
    """Return the name of a part of the model for use in a sentence."""
    return f"layer {part}" if part.isdecimal() else part


def _largest(row: Sequence[float]) -> float:
    return max((value for value in row if not math.isnan(value)), default=math.nan)
