"""Sizes of a model as scaling laws count them: without embedding and head."""

from typing import TYPE_CHECKING

from titan_loop.models.units import TABLES

if TYPE_CHECKING:
    from titan_loop.models.decoder import LoopDecoder


def model_sizes(model: "LoopDecoder.Config") -> dict[str, float]:
    """Return `parameters`, `looped`, `total` and `experts`, which `Losses` describes."""
    from titan_loop.distributed.state_bytes import unit_sizes  # slow: imports torchtitan

    units = [unit for unit in unit_sizes(model) if unit.unit.name != TABLES]
    total = sum(unit.parameters() for unit in units)
    looped = sum(unit.parameters() for unit in units if unit.unit.is_looped)
    return {
        "parameters": total - model.idle_parameters(),
        "looped": looped - model.idle_parameters(looped=True),
        "total": total,
        "experts": model.experts_per_active,
    }
