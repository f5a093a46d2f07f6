"""Bounds of the options of a run's stability, from both sides."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.training.stability.config import StabilityConfig


@pytest.mark.parametrize(
    ("accepted", "refused", "message"),
    [
        ({"threshold": 1.0}, {"threshold": 0.9}, "threshold=0.9 must be at least 1; 8 is usual"),
        ({"threshold": 99.0}, {"threshold": math.inf}, "threshold=inf must be at least 1"),
        ({"window": 4}, {"window": 3}, "window=3 must be at least 4"),
        ({"skips": 1}, {"skips": 0}, "skips=0 must be at least 1"),
        ({"rewinds": 0}, {"rewinds": -1}, "rewinds=-1 must be at least 0"),
        ({"skips": 64}, {"skips": 65}, "skips=65 do not fit into stability.window=64"),
        ({"straggler": 0.0}, {"straggler": 1.0}, "straggler=1.0 must be above 1, or 0 for none"),
        ({"straggler": 1.1}, {"straggler": -1.5}, "straggler=-1.5 must be above 1"),
        ({"straggler": 9.0}, {"straggler": math.inf}, "straggler=inf must be above 1"),
        (
            {"heartbeat_seconds": 0.0},
            {"heartbeat_seconds": -0.1},
            "heartbeat_seconds=-0.1 must be 0 (none) or more; 30 is usual",
        ),
        (
            {"heartbeat_seconds": 0.1},
            {"heartbeat_seconds": math.inf},
            "heartbeat_seconds=inf must be 0",
        ),
        ({"norms_interval": 0}, {"norms_interval": -1}, "norms_interval=-1 is negative; 0 measure"),
    ],
)
def test_a_bound_is_accepted_and_a_value_beyond_it_refused(accepted, refused, message):
    assert not [*StabilityConfig(**accepted).refusals()]
    (refusal,) = StabilityConfig(**refused).refusals()
    assert str(refusal).startswith(f"stability.{message}")


def test_windows_jumped_over():
    assert StabilityConfig(skips=3, rewinds=2).most_jumped_steps == 0
    assert StabilityConfig(skip_spikes=True, skips=5, rewinds=2).most_jumped_steps == 10


@pytest.mark.parametrize(
    ("values", "unused"),
    [
        ({}, ""),
        ({"norms_interval": 5, "straggler": 2.0}, ""),  # these need no skipping
        ({"skips": 4}, "stability.skips=4"),
        ({"rewinds": 1, "window": 32}, "stability.window=32"),
        ({"skips": 4, "skip_spikes": True}, ""),
    ],
)
def test_a_setting_without_effect(values, unused):
    assert StabilityConfig(**values).unused() == unused


def setting_refusals(
    skip_spikes: bool = True, rewinds: int = 2, window: int = 64, **checkpoint: Any
) -> list[str]:
    config = StabilityConfig(skip_spikes=skip_spikes, rewinds=rewinds, window=window)
    usual = {
        "enable": True,
        "load_only": False,
        "interval": 21,
        "keep_latest_k": 4,
        "keep_every": 0,
    }
    given: Any = SimpleNamespace(**{**usual, **checkpoint})
    return [str(refusal) for refusal in config.setting_refusals(checkpoint=given)]


@pytest.mark.parametrize(
    "values",
    [
        {},  # 63 steps are three intervals, so four checkpoints reach before them
        {"keep_latest_k": 0},
        {"keep_latest_k": 1, "keep_every": 100},
        {"keep_latest_k": 1, "rewinds": 0},
        {"keep_latest_k": 1, "enable": False, "skip_spikes": False},
        {"enable": False, "rewinds": 0},
        {"interval": 63, "keep_latest_k": 2},
    ],
)
def test_a_run_that_can_rewind_is_accepted(values):
    assert setting_refusals(**values) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_latest_k": 3}, "checkpoint.keep_latest_k=3 of checkpoints 21 steps apart may"),
        ({"interval": 20}, "checkpoint.keep_latest_k=4 of checkpoints 20 steps apart may"),
        ({"interval": 62, "keep_latest_k": 2}, "checkpoint.keep_latest_k=2 of checkpoints 62"),
        ({"keep_latest_k": 1, "interval": 99}, "checkpoint.keep_latest_k=1 of checkpoints 99"),
        ({"enable": False}, "stability.rewinds=2 needs checkpoints to go back to"),
        ({"load_only": True}, "stability.rewinds=2 needs checkpoints to go back to"),
    ],
)
def test_a_run_that_cannot_rewind_is_refused(values, message):
    (refusal,) = setting_refusals(**values)
    assert refusal.startswith(message)


@pytest.mark.parametrize(("interval", "needed"), [(1, 64), (20, 5), (62, 3), (63, 2), (1000, 2)])
def test_the_fix_names_the_fewest_checkpoints_that_do(interval, needed):
    (refusal,) = setting_refusals(interval=interval, keep_latest_k=1)
    assert refusal.endswith(f"; keep at least {needed}, or all (0)")
    assert setting_refusals(interval=interval, keep_latest_k=needed) == []
