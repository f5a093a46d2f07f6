"""Stages that differ only in numbers, so that one rehearsal stands for all of them.

A rehearsal sees no values: a seed, a source, a rate or the η of a prior changes nothing that it
reports. Whatever is not known to be such a number counts as a difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.trainer import LoopTrainer

_WHOLE = ("activation_checkpoint.memory_budget",)
"""Numbers with a fraction that decide more than by their sign."""

_ONLY_VALUES = (
    "stage",
    "dump_folder",
    "total_tokens",
    "total_flops",
    "batch",  # the work of a rank and the micro-batches are in the needs
    "dataloader",  # its columns are compared instead
    "learning_rate",
    "debug.seed",
    "checkpoint.carry",
    "checkpoint.interval",
    "checkpoint.keep_every",
    "held_out.interval",
    "held_out.sources",
    "suite",
)


def assembly(config: LoopTrainer.Config, needs: StageNeeds, micro_batches: int) -> Any:
    """Return what a rehearsal of the stage depends on; compare it with ==.

    Args:
        config: The stage's config, not resolved.
        needs: What `plan` says of it.
        micro_batches: Number of micro-batches of the step that is measured.
    """
    loader = config.dataloader
    return (
        _traits(config),
        _traits(stage_architecture(config).architecture()),
        (loader.columns(), loader.knows_depth()),
        (needs.shape, needs.units, needs.policy, needs.data_parallel_ranks, micro_batches),
    )


def _traits(value: Any, name: str = "") -> Any:
    """Return a config without what are only values; of most numbers with a fraction, the sign."""
    if is_dataclass(value):
        inside = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return type(value), _traits(inside, name)
    if isinstance(value, Mapping):
        named = {key: f"{name}.{key}".lstrip(".") for key in value}
        return {
            key: _traits(value[key], path)
            for key, path in named.items()
            if path not in _ONLY_VALUES
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_traits(item, name) for item in value]
    if isinstance(value, float) and name not in _WHOLE:
        return (value > 0) - (value < 0)
    return value
