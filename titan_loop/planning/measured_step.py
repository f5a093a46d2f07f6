"""The step that a rehearsal measured, and everything that decides it.

A rehearsal sees no values: stages that differ only in a seed, a source, a rate or the η of a prior
share one result. A field counts as a difference unless it is known to be such a value.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from titan_loop.checkpoint.keep_policy import KeepPolicy
from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.planning.step_meter import Moved, plus

_ONLY_VALUES = (
    "stage",
    "dump_folder",
    "total_tokens",
    "total_flops",
    "batch",  # its micro-batches are in the key
    "dataloader",  # its columns are compared instead
    "learning_rate",
    "callbacks",
    "debug.seed",
    "checkpoint.carry",
    "checkpoint.interval",
    *(f"checkpoint.{each.name}" for each in fields(KeepPolicy)),
    "held_out.interval",
    "held_out.sources",
    "suite",
)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One training step of rank 0, and its checkpoint.

    Attributes:
        moved: Collectives of the step by kind.
        moved_again: Collectives of its last micro-batch, which every further one repeats.
        checkpoint_bytes: Bytes that the rank would write to a checkpoint.
    """

    micro_batches: int
    moved: Mapping[str, Moved] = field(default_factory=dict)
    moved_again: Mapping[str, Moved] = field(default_factory=dict)
    peak_bytes: float
    checkpoint_bytes: int = 0

    def moved_in(self, micro_batches: float) -> dict[str, Moved]:
        """Return the collectives of a step with at least as many micro-batches."""
        return plus(self.moved, self.moved_again, max(0, round(micro_batches) - self.micro_batches))


def rehearsal_key(needs: StageNeeds, ranks: int, micro_batches: int) -> str:
    """Return a text that has everything that decides the result of a rehearsal."""
    loader = needs.config.dataloader
    decides = {
        "config": traits(needs.config),
        "model": [type(needs.model), traits(needs.model.architecture)],
        "units": [[unit.unit, unit.shapes] for unit in needs.units],
        "columns": [traits(loader.columns()), loader.knows_depth()],
        "work": [ranks, needs.policy, needs.recurrent_steps, micro_batches],
        "reached": needs.config.recurrence.most_backward_steps,
    }
    return json.dumps(decides, sort_keys=True, default=repr)


def traits(value: Any, name: str = "") -> Any:
    """Return a config without values that do not decide; most floats become their sign."""
    if is_dataclass(value):
        inside = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return [type(value), traits(inside, name)]
    if isinstance(value, Mapping):
        named = {key: f"{name}.{key}".lstrip(".") for key in value}
        return {
            key: traits(value[key], path) for key, path in named.items() if path not in _ONLY_VALUES
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [traits(item, name) for item in value]
    if isinstance(value, float) and name != "activation_checkpoint.memory_budget":
        return (value > 0) - (value < 0)
    return value
