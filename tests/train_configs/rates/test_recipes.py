"""The rates sweep's tables and verdicts, on made-up results with a known best rate."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from titan_loop.analysis.results import RunResult
from train_configs.rates.recipes import RATES, SHAPES, TABLES
from train_configs.rates.verdict import (
    Sweep,
    best_cells,
    boundary_text,
    rates_text,
)

BEST = {"r1": 3, "r2": 3, "r4": 3, "r8": 2, "d64": 4, "d256": 3}
"""Shape → index of its best rate."""
NOISE = {1: 0.001, 2: -0.001}
"""Seed → bits per byte added to all of its losses."""
_, RULED = TABLES["rates"]


def write(folder: Path, stage: str, seed: int, steps: int, bits: float) -> None:
    RunResult(
        recipe="rates", stage=stage, seed=seed, overrides=[], commit=None, machine="", versions={},
        tokens=1, steps=1, seconds=60.0, losses=[[1, 1.0]],
        results={f"held_out/all/bits_per_byte/static:{steps}": bits},
    ).save(folder)  # fmt: skip


def sweep(
    folder: Path,
    best: Mapping[str, float] = BEST,
    *,
    curvature: float = 0.008,
    seeds: Sequence[int] = (1, 2),
    leave_out: Callable[[str, int], bool] = lambda *_: False,
) -> list[RunResult]:
    """Return a ruled sweep read from files; a shape's loss is a parabola around its best rate."""
    for shape, (steps, _) in SHAPES.items():
        for place, rate in enumerate(RATES):
            for seed in seeds:
                bits = 2.0 + curvature * (place - best[shape]) ** 2 + NOISE[seed]
                if not leave_out(f"{shape}_{rate}", seed):
                    write(folder, f"ruled_{shape}_{rate}", seed, steps, bits)
    return RunResult.all_of(folder / "rates")


def test_best_rates_one_step_apart_meet_both_aims(tmp_path):
    text = rates_text(RULED, sweep(tmp_path), 2)
    lines = text.splitlines()
    assert lines[0] == "bits per byte, AdamW, with the rules, seeds: 1, 2"
    assert lines[1].split()[3:6] == ["steps", "from", "5.7e-3"]
    rows = {line[:15].strip(): line[15:].split() for line in lines[3:9]}
    assert rows["R = 4, D = 128"] == ["5.7e-3", "0", "5.7e-3", "2.000", "2.000", "0.000"]
    assert rows["R = 8, D = 128"] == ["4.0e-3", "-1", "4.0e-3", "2.000", "2.008", "0.008"]
    assert rows["R = 2, D = 64"] == ["8.0e-3", "+1", "8.0e-3", "2.000", "2.008", "0.008"]
    assert lines[9] == (
        "Best rates: met. The largest distance from the shared rate 5.7e-3 is 1 step of √2, at "
        "R = 8, D = 128 (aim: at most 1); the lowest and the highest best rate are 2 steps apart."
    )
    assert lines[10] == (
        "Loss at 5.7e-3: met. The largest difference from a shape's best rate is 0.0080 bits per "
        "byte, at R = 8, D = 128 (aim: at most 0.01)."
    )


def test_a_best_rate_two_steps_away_misses_both_aims(tmp_path):
    text = rates_text(RULED, sweep(tmp_path, {**BEST, "r8": 1}), 2)
    assert "Best rates: missed. The largest distance" in text
    assert "Loss at 5.7e-3: missed. The largest difference" in text
    assert "0.0320 bits per byte, at R = 8, D = 128" in text


@pytest.mark.parametrize(("place", "rate"), [(0, "2.0e-3"), (6, "1.6e-2")])
def test_a_best_rate_at_the_edge_is_marked_and_qualifies_the_verdicts(tmp_path, place, rate):
    results = sweep(tmp_path, {**BEST, "r8": place})
    text = rates_text(RULED, results, 2)
    assert f"R = 8, D = 128  {rate} (edge)" in text
    assert text.count("(edge)") == 1
    assert text.count("missed (R = 8, D = 128 is best at the edge of the grid)") == 2
    assert Sweep.of(RULED, results).vertex("R = 8, D = 128") is None


def test_the_boundary_is_compared_with_plain_at_the_best_rate_of_each(tmp_path):
    losses = {"plain": {"2.8e-3": 2.3, "4.0e-3": 2.1, "5.7e-3": 2.0, "8.0e-3": 2.1}}
    losses["boundary"] = {"2.8e-3": 1.9, "4.0e-3": 1.95, "5.7e-3": 2.0, "8.0e-3": 2.2}
    for name, by_rate in losses.items():
        for rate, bits in by_rate.items():
            for seed in (1, 2, 3):
                gain = 0.001 * seed * (name == "boundary")
                write(tmp_path, f"{name}_{rate}", seed, 4, bits + 0.1 * seed - gain)
    results = RunResult.all_of(tmp_path / "rates")
    (table,) = TABLES["boundary"]
    assert boundary_text(table, results, 3).splitlines()[1] == (
        "boundary less plain: met (boundary is best at the edge of the grid). At their best rates, "
        "2.8e-3 and 5.7e-3, the difference is -0.1020 [-0.1045, -0.0995] bits per byte (aim: at "
        "most 0)."
    )
    assert [stage for stage, _ in best_cells(table, results)] == ["plain_5.7e-3", "boundary_2.8e-3"]
