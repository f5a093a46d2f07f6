"""A budget in training FLOPs in place of one in tokens.

    total_flops ─► tokens that it pays for ─► total_tokens, and every schedule stretched with it

Stretched schedules keep their shape, so the mean cost of a token does not change.
"""

import math
from dataclasses import fields, replace
from typing import Any

from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.config import RunConfig
from titan_loop.training.depth_schedule import depths_over
from titan_loop.training.schedule import Schedule


def mean_flops(config: RunConfig, model: LoopDecoder.Config) -> Flops:
    """Return the model FLOPs of a trained token, averaged over the run."""
    depths = depths_over(config.recurrence, config.total_tokens)
    seq_len, total = config.training.seq_len, depths.total()
    shares: list[list[float]] = []
    for (steps, reached), count in depths.items():
        flops = model.training_flops(seq_len, steps, config.trainable, reached)
        shares.append([part * (count / total) for part in flops])
    return Flops(*map(sum, zip(*shares, strict=True)))


def within_budget(config: RunConfig) -> RunConfig:
    """Return a config that trains on as many tokens as its `total_flops` pay for.

    Without a budget, or once its schedules are stretched, it is `config` itself.
    """
    budget = config.total_flops
    if budget is None or config.total_tokens < 1:  # which a later check refuses
        return config
    if not 0 < budget < math.inf:
        raise UserError(f"total_flops={budget:g} must be above 0 and finite")
    per_token = mean_flops(config, stage_architecture(config)).total
    tokens = int(budget / per_token)
    if tokens < config.training.seq_len:
        raise UserError(
            f"total_flops={budget:g} pays for {tokens:,} tokens at {per_token:.3g} FLOPs each, "
            f"less than training.seq_len={config.training.seq_len}; give more"
        )
    # Stretched before: R's rounding moves the mean of a coarse schedule by less than a thousandth.
    if abs(tokens - config.total_tokens) <= max(config.training.seq_len, tokens // 1000):
        return config
    factor = tokens / config.total_tokens
    try:
        return replace(
            _stretched(config, factor),
            total_tokens=tokens,
            recurrence=_stretched(config.recurrence, factor),
            batch=_stretched(config.batch, factor),
            loss=_stretched(config.loss, factor),
        )
    except UserError as error:
        raise UserError(
            f"total_flops={budget:g} pays for {tokens:,} tokens, too few for a schedule over "
            f"{config.total_tokens:,}: {error}"
        ) from error


def _stretched(config: Any, factor: float) -> Any:
    """Return a config with its own schedules stretched."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    schedules = {name: value for name, value in values.items() if isinstance(value, Schedule)}
    return replace(config, **{name: s.stretched(factor) for name, s in schedules.items()})
