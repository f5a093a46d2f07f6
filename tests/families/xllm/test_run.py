"""Runs with drawn and learned depths: killed, resumed on other ranks, with the same depths."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.multiprocess import RankError
from tests.support.tiny import act_as_launched, train_run
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.xllm.depth import DrawnDepth, capped_depths
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.families.xllm.prior import LearnedDepth, PriorSettings
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.callback import Callback
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.xllm.analysis import learned_depths

WINDOW, WINDOWS, STEPS = 32, 8, 8
# fp32 sums in another order, through eight updates of AdamW
RELATIVE_TOLERANCE = 1e-4


def config_of(folder: Path, *depths: Callback) -> LoopTrainer.Config:
    """Return a run of drawn depths up to 6, truncated at 2."""
    batch = WINDOWS * WINDOW
    config = LoopTrainer.Config(
        dump_folder=str(folder),
        total_tokens=STEPS * batch,
        model=XllmOptions(start_state="zero", injection="orthogonal"),
        dataloader=TaskLoader.Config(task=Mano(5, 3)),
        learning_rate=Schedule.constant(1e-3),
        recurrence=RecurrenceConfig(
            steps=Schedule.constant(2.5),
            poisson=True,
            lognormal_sigma=0.5,
            max_steps=6,
            backward_steps=2,
        ),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(batch)),
        callbacks=depths,
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 2
    config.checkpoint.interval = 2
    config.metrics.log_freq = 1
    return config


def train(folder: Path, world: int, killed_at: int | None = None) -> None:
    """Train on `world` ranks, of which the last is killed after a step."""

    class Killer(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.step == killed_at and dist.get_rank() == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    act_as_launched(world)
    settings = PriorSettings(burn_in=1, rate=0.3, mean=2.5)
    learned = LearnedDepth(capped_depths(2.5, 0.5, 6).tolist(), settings=settings)
    train_run(config_of(folder, learned), callbacks=[Killer()])


@pytest.fixture
def whole(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, trained once for the tests, which only read it."""
    folder = tmp_path_factory.getbasetemp() / "xllm-whole"
    if not folder.exists():
        train(folder, 1)
    return folder


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of a run by step."""
    return {record["step"]: record for record in RunDirectory(folder).read_metrics()}


@pytest.mark.multiprocess
def test_a_killed_run_resumes_on_other_ranks_with_the_same_depths(gloo_pool, whole, tmp_path: Path):
    killed = tmp_path / "killed"
    with pytest.raises(RankError):
        gloo_pool(2).run(train, killed, 2, 3)
    train(killed, 1)
    expected, found = records(whole), records(killed)
    assert [*found] == list(range(1, STEPS + 1))
    means = {record["depth_prior/mean"] for record in expected.values()}
    assert len(means) > STEPS - 3  # it learns from every step but the first
    assert len({record["recurrent_steps"] for record in expected.values()}) > 1
    for step, record in found.items():
        assert record["data_hash"] == expected[step]["data_hash"]
        assert record["recurrent_steps"] == expected[step]["recurrent_steps"]
        for key in ("loss", "grad_norm", "depth_prior/mean", "depth_prior/entropy"):
            assert record[key] == pytest.approx(expected[step][key], rel=RELATIVE_TOLERANCE)
    found = learned_depths(whole)
    newest = read_manifest(RunDirectory(whole).checkpoint(STEPS))["trainer"]["depth_prior"]
    probabilities = np.exp(newest["logits"]) / np.exp(newest["logits"]).sum()
    shown = found.record["probabilities"]
    assert [*shown] == ["2", "4", "6", "8"]
    np.testing.assert_allclose(shown["8"], probabilities, rtol=1e-12)
    assert found.results["learned_depths/mean/start"] == expected[1]["depth_prior/mean"]
    assert found.results["learned_depths/mean/end"] == expected[STEPS]["depth_prior/mean"]
    assert "R 6" in found.text()
    assert all(path.is_file() for path in found.save())


def halves() -> DrawnDepth:
    """Depths of both halves of a global batch."""
    depths = capped_depths(2.5, 0.5, 6).tolist()
    return DrawnDepth(probabilities=depths, antithetic=True, per_step=2)


def train_halves(folder: Path, world: int) -> None:
    """Train on `world` ranks, with a depth for either half of the batch."""
    act_as_launched(world)
    train_run(config_of(folder, halves()))


@pytest.mark.multiprocess
@pytest.mark.usefixtures("alone")
def test_parts_of_a_batch_have_the_same_depths_on_two_ranks(gloo_pool, tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_halves(one, 1)
    gloo_pool(2).run(train_halves, two, 2)
    drawn, found = halves(), records(two)
    pairs = [(drawn.draw(2 * step), drawn.draw(2 * step + 1)) for step in range(STEPS)]
    assert any(first != second for first, second in pairs)
    for step, record in records(one).items():
        assert record["recurrent_steps"] == round(sum(pairs[step - 1]) / 2)
        for key in ("loss", "grad_norm"):
            assert found[step][key] == pytest.approx(record[key], rel=RELATIVE_TOLERANCE)


def test_the_learned_distribution_is_shown_as_it_was_at_each_checkpoint(whole: Path):
    recorded = records(whole)
    late, early = (learned_depths(path) for path in (whole, whole / "checkpoints/step-6"))
    assert [*late.record["probabilities"]] == ["2", "4", "6", "8"]
    assert [*early.record["probabilities"]] == ["2", "4", "6"]
    for step, probabilities in late.record["probabilities"].items():
        depths = np.arange(1, 7)
        mean = recorded[int(step)]["depth_prior/mean"]
        entropy = recorded[int(step)]["depth_prior/entropy"]
        assert probabilities @ depths == pytest.approx(mean)
        assert -sum(p * np.log(p) for p in probabilities) == pytest.approx(entropy)
    # The quarter and the half of eight records, counted from the first.
    for moment, step in (("start", 1), ("quarter", 3), ("half", 5), ("end", 8)):
        for name in ("mean", "entropy"):
            value = recorded[step][f"depth_prior/{name}"]
            assert late.results[f"learned_depths/{name}/{moment}"] == value
    assert early.results["learned_depths/mean/end"] == recorded[6]["depth_prior/mean"]
    moved, shown = late.tables.values()
    assert [row[:2] for row in moved[1:]] == [
        ["start", "1"],
        ["quarter", "3"],
        ["half", "5"],
        ["end", "8"],
    ]
    assert shown[0] == ["step", *(f"R {depth}" for depth in range(1, 7))]
    assert shown[-1][1] == f"{late.record['probabilities']['8'][0]:.3f}"
    assert len({record["depth_prior/mean"] for record in recorded.values()}) > STEPS - 3
    assert all(path.is_file() for path in late.save())


@pytest.mark.usefixtures("alone")
def test_depths_that_micro_batches_cannot_share_are_refused(tmp_path: Path):
    config = config_of(tmp_path / "run", replace(halves(), per_step=3))
    with pytest.raises(UserError, match="4 micro-batches cannot have 3 depths: draw fewer, or set"):
        train_run(config)
    with pytest.raises(UserError, match="per_step"):
        replace(halves(), per_step=0)


@pytest.mark.usefixtures("alone")
def test_a_run_has_the_depths_that_are_drawn(tmp_path: Path):
    drawn = DrawnDepth(probabilities=capped_depths(2.5, 0.5, 6).tolist(), antithetic=True)
    train_run(config_of(tmp_path / "run", drawn))
    depths = [record["recurrent_steps"] for record in records(tmp_path / "run").values()]
    assert depths == [drawn.draw(step) for step in range(STEPS)]
    with pytest.raises(UserError, match="no learned distribution of depths; train with"):
        learned_depths(tmp_path / "run")
