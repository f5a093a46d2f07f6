"""Runs of a mixture: killed and resumed with the same routing, loads recorded, experts balanced."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.multiprocess import RankError
from tests.support.tiny import act_as_launched, tiny_config, train_run
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.families.nanbeige.model import NanbeigeOptions
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.callback import Callback
from titan_loop.training.trainer import LoopTrainer

RATE = 0.01
BIAS = "layers.1.moe.expert_bias_SE"


def moe_config(source: Path, folder: Path) -> LoopTrainer.Config:
    config = tiny_config(source, folder, steps=4)  # R falls from 4 to 2
    config.model = MoEOptions(experts=4, dense_layers=(1,), bias_rate=RATE)
    config.loss = MoELoss.Config(balance_weight=1e-3, router_z_weight=1e-4)
    return config


def routing(folder: Path) -> dict[int, dict[str, object]]:
    records = read_jsonl(RunDirectory(folder).metrics_jsonl)
    return {
        record["step"]: {key: value for key, value in record.items() if key.startswith("experts/")}
        for record in records
    }


@pytest.fixture
def whole(source: Path, alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with Muon and an average; trained once for all tests, which read it."""
    folder = tmp_path_factory.getbasetemp() / "moe-whole"
    if not folder.exists():
        spread(source, folder, 1, 1)
    return folder


def test_a_resumed_run_routes_as_one_that_was_not_stopped(
    source: Path, whole: Path, tmp_path: Path
):
    parts = tmp_path / "parts"
    for steps in (2, 0):
        spread(source, parts, 1, 1, steps=steps)
    assert routing(parts) == routing(whole)

    first, last = routing(whole)[1], routing(whole)[4]
    assert {name for name in first if "load/" in name} == {
        f"experts/load/layer_2_step_{step}" for step in (1, 2, 3, 4)
    }
    assert "experts/load/layer_2_step_3" not in last  # R was 2
    for name, loads in first.items():
        if "load/" in name:
            assert isinstance(loads, list)
            assert sum(loads) == pytest.approx(4.0)
    assert {"experts/balance", "experts/router_z", "experts/max_load", "experts/unused"} <= {*last}

    # One update of the bias a training step, over all visits: the sum of their directions.
    expected = torch.zeros(4)
    for record in routing(whole).values():
        loads = torch.tensor([value for name, value in record.items() if "load/" in name]).sum(0)
        direction = (loads.mean() - loads).sign()
        expected += RATE * (direction - direction.mean())
    saved = CheckpointReader(SavedRun.open(whole).checkpoint().path).read(BIAS)
    torch.testing.assert_close(saved[0], expected, atol=1e-6, rtol=0)


def spread(
    source: Path,
    folder: Path,
    world: int,
    expert_parallel: int,
    killed_at: int | None = None,
    steps: int = 0,
) -> None:
    act_as_launched(world)
    config = moe_config(source, folder)
    config.training.steps = steps
    config.optimizer.name = "muon"
    config.ema.decay = 0.9
    config.parallelism.expert_parallel_degree = expert_parallel

    class Killer(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.step == killed_at and dist.get_rank() == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    train_run(config, callbacks=[Killer()])


@pytest.mark.multiprocess
def test_a_killed_run_goes_on_at_another_degree_of_expert_parallelism(
    gloo_pool: Any, source: Path, whole: Path, tmp_path: Path
):
    records = read_jsonl(RunDirectory(whole).metrics_jsonl)
    spread_one = tmp_path / "ep2-ep1"
    with pytest.raises(RankError):
        gloo_pool(2).run(spread, source, spread_one, 2, 2, 3)
    assert SavedRun(spread_one).steps() == [2]
    spread(source, spread_one, 1, 1)
    # The other way: as if the run of one process had been killed before its second checkpoint.
    gathered_one = shutil.copytree(whole, tmp_path / "ep1-ep2")
    shutil.rmtree(RunDirectory(gathered_one).checkpoint(4))
    gloo_pool(2).run(spread, source, gathered_one, 2, 2)
    for folder in (spread_one, gathered_one):
        assert SavedRun(folder).steps() == [2, 4]
        found = RunDirectory(folder).read_metrics()  # the file also has the killed run's step 3
        for key in ("step", "data_hash", "windows_consumed"):
            assert [record[key] for record in found] == [record[key] for record in records]
        for got, want in zip(routing(folder).values(), routing(whole).values(), strict=True):
            for name, value in want.items():
                loads = "load" in name or "unused" in name
                assert got[name] == (value if loads else pytest.approx(value, rel=1e-5))
        assert [record["loss"] for record in found] == pytest.approx(
            [record["loss"] for record in records], rel=1e-5
        )


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_without_experts_is_refused_in_a_line(source: Path, tmp_path: Path):
    dense = moe_config(source, tmp_path / "dense")
    dense.training.steps = 2
    dense.loss = ExpectedExitLoss.Config()
    dense.model = NanbeigeOptions()
    train_run(dense)
    resumed, started = moe_config(source, tmp_path / "dense"), moe_config(source, tmp_path / "new")
    started.checkpoint.carry.parent = str(tmp_path / "dense")
    for config in (resumed, started):
        with pytest.raises(UserError, match="is of another architecture") as found:
            train_run(config)
        assert "model.family=moe (checkpoint: nanbeige)" in str(found.value)
        assert "model.experts=4 (checkpoint: unknown)" in str(found.value)
        assert "\n" not in str(found.value)
