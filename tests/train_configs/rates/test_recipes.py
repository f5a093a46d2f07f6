"""The cells that the claims about rates compare, of made-up results with a known best rate."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from titan_loop.analysis.results import RunResult
from train_configs.rates.best_rates import best_cells, worst_cells
from train_configs.rates.recipes import RATES, SHAPES, TABLES

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


def test_the_worst_row_is_compared_at_the_shared_rate_and_at_its_best(tmp_path):
    (shared, _), (best, _) = worst_cells(RULED, sweep(tmp_path, {**BEST, "r8": 1}))
    assert (shared, best) == ("ruled_r8_5.7e-3", "ruled_r8_2.8e-3")


def test_a_seed_without_all_runs_is_left_out(tmp_path):
    results = sweep(
        tmp_path, leave_out=lambda run, seed: (run, seed) == ("r1_2.0e-3", 2) or seed == 1
    )
    assert worst_cells(RULED, results) == []


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
    assert [stage for stage, _ in best_cells(table, results)] == ["plain_5.7e-3", "boundary_2.8e-3"]
