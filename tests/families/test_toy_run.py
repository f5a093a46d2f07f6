"""The toy family on the toy task, by the commands: killed, resumed, examined, planned, refused."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.families.toy_recipe import toy
from tests.support.multiprocess import RankError
from tests.support.tiny import act_as_launched, train_run
from titan_loop.cli import main
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.callback import Callback

STEPS = 6
RECIPE = "tests.families.toy_recipe:toy"


def train(folder: Path, world: int, killed_at: int | None = None) -> None:
    act_as_launched(world)
    config = toy()
    config.dump_folder = str(folder)

    class Killer(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.step == killed_at and dist.get_rank() == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    train_run(config, callbacks=[Killer()])


def stream(folder: Path) -> dict[int, str]:
    records = read_jsonl(RunDirectory(folder).metrics_jsonl)
    return {record["step"]: record["data_hash"] for record in records}


@pytest.mark.multiprocess
def test_a_killed_run_resumes_at_another_world_size_with_the_same_stream(
    gloo_pool, tmp_path: Path, capfd
):
    gloo_pool(1).run(train, tmp_path / "whole", 1)
    with pytest.raises(RankError):
        gloo_pool(2).run(train, tmp_path / "killed", 2, 4)
    assert SavedRun(tmp_path / "killed").steps() == [2]
    gloo_pool(1).run(train, tmp_path / "killed", 1)
    assert stream(tmp_path / "killed") == stream(tmp_path / "whole")
    assert [*stream(tmp_path / "killed")] == list(range(1, STEPS + 1))

    run = str(tmp_path / "killed")
    assert SavedRun(run).checkpoint().manifest["trainer"]["architecture"]["update_scale"] == 0.5
    assert main.main(["eval", run, "--tasks", "backwards", "--depths", "1", "3"]) == 0
    assert "backwards" in capfd.readouterr().out
    for words, message in (
        (["convert", "export", run, "--output", f"{run}-hf"], "family=toy does not support export"),
        (["upcycle", run, "--output", f"{run}-deep", "--layers", "4"], "does not support upcycle"),
        (["eval", run, "--tasks", "backwards", "--exit", "q:0.5"], "model.family=toy does not"),
    ):
        assert main.main(words) == 2
        (line,) = [x for x in capfd.readouterr().err.splitlines() if "error" in x]
        assert message in line


def test_the_toy_is_planned(capfd):
    assert main.main(["plan", RECIPE, "--nodes", "1", "--gpus-per-node", "4"]) == 0
    out = capfd.readouterr().out
    assert "update norm" in out  # its own unit travels
