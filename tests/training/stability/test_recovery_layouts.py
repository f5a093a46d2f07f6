"""Spikes under tensor and context parallelism: one process' decisions."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.spikes import Spikes
from tests.support.tiny import BATCH_WINDOWS, act_as_launched, train_run
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.schedule import Schedule
from tools.spikes import demonstration

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "cp2": (2, {"context_parallel_degree": 2}),
}
BAD_STEPS, POISONED_AFTER, SAVED, STEPS = (10, 12), 11, 9, 12
TOLERANCE = 1e-3
"""Of losses and norms: rounding grows over a dozen steps, and a poisoned layer multiplies it."""


def train(source: Path, run: Path, layout: str) -> None:
    """A bad batch is skipped; another one meets a layer that went bad, so the run goes back."""
    world, changes = LAYOUTS[layout]
    act_as_launched(world)
    config = demonstration(source, run)
    config.training.steps, config.checkpoint.interval = STEPS, SAVED
    config.training.local_batch_size = BATCH_WINDOWS
    config.recurrence.steps = Schedule.constant(1)
    bad = [BATCH_WINDOWS * (step - 1) + n for step in BAD_STEPS for n in range(BATCH_WINDOWS)]
    config.callbacks = (Spikes(bad, poisoned_after=POISONED_AFTER, factor=30.0),)
    for name, degree in changes.items():
        setattr(config.parallelism, name, degree)
    train_run(config)


def decisions(run: Path) -> list[dict[str, Any]]:
    return RunDirectory(run).read_decisions()


@pytest.fixture(scope="module")
def runs(source: Path, tmp_path_factory: pytest.TempPathFactory, gloo_pool) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decisions")
    for layout, (world, _) in LAYOUTS.items():
        gloo_pool(world).run(train, source, folder / layout, layout)
    taken = [(record["decision"], record["step"]) for record in decisions(folder / "one")]
    assert taken == [*(("skip", step) for step in BAD_STEPS), ("rewind", BAD_STEPS[-1])]
    return {layout: folder / layout for layout in LAYOUTS}


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_decides_as_one_process(runs: dict[str, Path], layout: str):
    found, expected = decisions(runs[layout]), decisions(runs["one"])
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        for name in ("decision", "step", "to_step", "windows", "rewound"):
            assert mine.get(name) == other.get(name), name
        if other["decision"] != "skip":
            continue
        for name in ("loss", "loss_bound", "grad_norm", "grad_norm_bound"):
            assert mine[name] == pytest.approx(other[name], rel=TOLERANCE), name
    hashes = [RunDirectory(run).read_metrics()[-1]["data_hash"] for run in runs.values()]
    assert len(set(hashes)) == 1
