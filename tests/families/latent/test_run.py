"""Runs of the latent family: on two ranks as on one, examined, analysed, and refused where not."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny import act_as_launched, train_run
from titan_loop.cli.main import main
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.latent.model import LatentOptions
from titan_loop.families.latent.objective import LatentSupervision
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.latent.task import DagArithmetic

TASK = DagArithmetic(modulus=5, nodes=6, leaves=3, names=12, most_depth=4, test_nodes=(5, 9))
WINDOW = 40
OPTIONS = LatentOptions(size="debugmodel", relative_window=8)
# fp32 sums in another order, through four updates
RELATIVE_TOLERANCE = 1e-4


def config_of(folder: Path, options: LatentOptions) -> LoopTrainer.Config:
    config = LoopTrainer.Config(
        dump_folder=str(folder),
        total_tokens=4 * 4 * WINDOW,
        model=options,
        dataloader=TaskLoader.Config(task=TASK, all_targets=True),
        loss=LatentSupervision.Config(),
        learning_rate=Schedule.constant(1e-3),
        recurrence=RecurrenceConfig(steps=Schedule.constant(4), from_data=True, max_steps=4),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(4 * WINDOW)),
        suite=SuiteConfig(interval=4, tasks=[TASK.name], depths=[2, 4], questions=8),
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 2
    config.metrics.log_freq = 1
    return config


def train(folder: Path, world: int, options: LatentOptions) -> None:

    act_as_launched(world)
    train_run(config_of(folder, options))


@pytest.mark.multiprocess
@pytest.mark.parametrize("state", ["discrete", "continuous"])
def test_two_ranks_train_as_one(gloo_pool, tmp_path: Path, state):
    options = replace(OPTIONS, state=state)
    for world in (1, 2):
        gloo_pool(world).run(train, tmp_path / str(world), world, options)
    one, two = (RunDirectory(tmp_path / str(world)).read_metrics() for world in (1, 2))
    assert len(one) == 4
    assert len({record["recurrent_steps"] for record in one}) > 1  # as deep as the batch
    for alone, shared in zip(one, two, strict=True):
        assert alone["recurrent_steps"] == shared["recurrent_steps"]
        assert alone["data_hash"] == shared["data_hash"]
        for key in ("loss", "ce/step_1", "ce/factors", "grad_norm"):
            assert alone[key] == pytest.approx(shared[key], rel=RELATIVE_TOLERANCE)


@pytest.mark.usefixtures("alone")
def test_a_run_is_examined_analysed_and_not_generated_from(tmp_path: Path, capfd):
    train(tmp_path / "run", 1, replace(OPTIONS, corruption=0.5))
    run = str(tmp_path / "run")
    (asked,) = read_jsonl(RunDirectory(run).evals_jsonl)
    assert {name.split("/")[1] for name in asked["results"]} == {"5_nodes"}  # 9 have no room
    words = ["eval", run, "--tasks", TASK.name, "--depths", "2", "12", "--limit", "8"]
    assert main([*words, "--max-length", "96"]) == 0
    assert "9_nodes" in capfd.readouterr().out
    assert main(["analyse", "repair", run, "--questions", "8"]) == 0
    assert "5_nodes" in capfd.readouterr().out
    assert main(["analyse", "solved", run, "--strata", "9_nodes", "--questions", "8"]) == 0
    assert "9_nodes" in capfd.readouterr().out
    assert main(["analyse", "circuits", run, "--samples", "4", "--graphs", "2"]) == 0
    assert "mean norm of the DFT" in capfd.readouterr().out
    assert {path.name for path in (tmp_path / "run" / "plots").iterdir()} == {
        "head-groups.png",
        "frequencies.png",
    }
    assert main(["report", run]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    for part in ("Head groups", "Heads by", "first attention", "mlp_post"):
        assert part in page
    capfd.readouterr()
    for words, message in (
        (["generate", run, "--prompt", "x"], "family=latent does not support generate"),
        (["convert", "export", run, "--output", f"{run}-hf"], "does not support export"),
        (["eval", run, "--tasks", TASK.name, "--exit", "kl:0.1,3"], "family=latent does not"),
        (["analyse", "circuits", run, "--nodes", "12"], "nodes=12 must be from 3, the leaves, to"),
        (["analyse", "repair", run, "--strata", "7_nodes"], "strata=7_nodes"),
        (["eval", run, "--tasks", TASK.name, "--depths", "2"], "does not fit into a window of 40"),
    ):
        code = main(words)
        told = capfd.readouterr()
        assert message in told.err + told.out, words
        assert code == 2 or words[0] == "eval"
