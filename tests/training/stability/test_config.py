"""Bounds of the options of a run's stability, from both sides."""

from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.training.stability.config import StabilityConfig


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


@pytest.mark.parametrize(("interval", "needed"), [(1, 64), (20, 5), (62, 3), (63, 2), (1000, 2)])
def test_the_fix_names_the_fewest_checkpoints_that_do(interval, needed):
    (refusal,) = setting_refusals(interval=interval, keep_latest_k=1)
    assert refusal.endswith(f"; keep at least {needed}, or all (0)")
    assert setting_refusals(interval=interval, keep_latest_k=needed) == []


def test_windows_jumped_over():
    assert StabilityConfig(skips=3, rewinds=2).most_jumped_steps == 0
    assert StabilityConfig(skip_spikes=True, skips=5, rewinds=2).most_jumped_steps == 10
