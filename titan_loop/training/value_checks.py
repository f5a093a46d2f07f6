"""Ranges of single values that a run needs, checked before it starts.

What involves several fields or the data is checked where it is used; upstream accepts all of these
and fails in the middle of a run, or trains on something nobody asked for.
"""

import math
from typing import Any

from titan_loop.errors import UserError

AT_LEAST_ONE = (
    "total_tokens",
    "training.seq_len",
    "training.local_batch_size",
    "training.gc_freq",
    "max_skipped_steps",
    "metrics.log_freq",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
)
SCHEDULES_NOT_NEGATIVE = ("learning_rate", "entropy_weight")
# Of a seed torch takes 64 bits; steps and ranks are mixed into it.
LARGEST_SEED = 2**63 - 1


def check_values(config: Any) -> None:
    """Refuse single values of a `LoopTrainer.Config` that are out of range.

    Args:
        config: A `LoopTrainer.Config`.

    Raises:
        UserError: Naming the field, its value and what it may be.
    """
    for name in AT_LEAST_ONE:
        if (value := _get(config, name)) < 1:
            raise UserError(f"{name}={value} must be at least 1")
    for name in SCHEDULES_NOT_NEGATIVE:
        schedule = _get(config, name)
        if schedule.smallest < 0:
            raise UserError(f"{name}={str(schedule)!r} falls below 0; keep it at 0 or more")
    for name in ("adamw.beta1", "adamw.beta2"):
        if not 0 <= (value := _get(config, name)) < 1:
            raise UserError(f"{name}={value} must be at least 0 and below 1; AdamW decays by it")
    if not 0 <= (value := config.adamw.weight_decay) < math.inf:
        raise UserError(f"adamw.weight_decay={value} must be 0 or more")
    if not 0 < (value := config.adamw.eps) < math.inf:
        raise UserError(f"adamw.eps={value} must be above 0; 1e-8 is usual")
    if not (value := config.training.max_norm) > 0:
        raise UserError(
            f"training.max_norm={value} must be above 0; inf clips no gradient, 1 is usual"
        )
    if not 0 <= (value := config.hang_seconds) < math.inf:
        raise UserError(f"hang_seconds={value} must be 0 (never) or more")
    if config.training.steps < 0:
        raise UserError(f"training.steps={config.training.steps} is negative; 0 is no limit")
    seed = config.debug.seed
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"debug.seed={seed} must be from 0 to 2**63 - 1")
    if config.comm.mode != "default":
        raise UserError(f"comm.mode={config.comm.mode} trains on nothing real; leave it at default")


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config
