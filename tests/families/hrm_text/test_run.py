"""Runs of HRM-Text: resumed on other numbers of ranks, averaged, exported, generating."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.inference.generation import check_generation
from tests.inference.reference import prompts
from tests.support.multiprocess import RankError
from tests.support.tiny import act_as_launched, train_run
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.cli.main import main
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import Confidence
from titan_loop.inference.rows import Request
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.callback import Callback
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from titan_loop.training.weight_average import WeightAverageConfig

WINDOW, WINDOWS, STEPS = 32, 8, 8
# fp32 sums in another order, through eight updates of AdamW
RELATIVE_TOLERANCE = 1e-4


def config_of(folder: Path) -> LoopTrainer.Config:
    """Return a run whose backward pass grows from 2 passes to all."""
    batch = WINDOWS * WINDOW
    config = LoopTrainer.Config(
        dump_folder=str(folder),
        total_tokens=STEPS * batch,
        model=HrmTextOptions(n_layers=2, low_cycles=2),
        dataloader=TaskLoader.Config(task=Mano(5, 3), prefix=True),
        learning_rate=Schedule.constant(1e-3),
        recurrence=RecurrenceConfig(
            steps=Schedule.constant(2),
            backward_growth=Schedule.steps([(0, 2), (3 * batch, 4), (6 * batch, 6)]),
        ),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(batch)),
        suite=SuiteConfig(interval=STEPS, tasks=["mano"], depths=[1, 2], questions=8),
        ema=WeightAverageConfig(decay=0.5),
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 2
    config.checkpoint.interval = 2
    config.metrics.log_freq = 1
    return config


def train(folder: Path, world: int, killed_at: int | None = None, examined: bool = False) -> None:
    """Train on `world` ranks, of which the last is killed after a step."""

    class Killer(Callback):
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.step == killed_at and dist.get_rank() == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    act_as_launched(world)
    train_run(
        config_of(folder) if examined else lambda config: [Killer()],
    )


@pytest.fixture
def whole(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, with its exam; trained once for the tests, which only read it."""
    folder = tmp_path_factory.getbasetemp() / "hrm-whole"
    if not folder.exists():
        train(folder, 1, examined=True)
    return folder


@pytest.mark.multiprocess
def test_a_killed_run_resumes_on_other_ranks_with_the_same_stream(gloo_pool, whole, tmp_path: Path):
    killed = tmp_path / "killed"
    with pytest.raises(RankError):
        gloo_pool(2).run(train, killed, 2, 3)
    train(killed, 1)
    expected, found = (
        {record["step"]: record for record in RunDirectory(folder).read_metrics()}
        for folder in (whole, killed)
    )
    assert [*found] == list(range(1, STEPS + 1))
    for step, record in found.items():
        assert record["data_hash"] == expected[step]["data_hash"]
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(expected[step][key], rel=RELATIVE_TOLERANCE)
    readers = [CheckpointReader(SavedRun(run).checkpoint().path) for run in (whole, killed)]
    for name in ("low_start.weight", "layers.1.attention.gate.weight"):
        first, second = (reader.read(name) for reader in readers)
        torch.testing.assert_close(first, second, atol=RELATIVE_TOLERANCE, rtol=0)


def test_a_run_is_examined_averaged_and_exported(whole: Path, tmp_path: Path, capfd):
    assert RunDirectory(whole).evals_jsonl.exists()
    assert main(["eval", str(whole), "--tasks", "mano", "--depths", "1", "2", "--limit", "8"]) == 0
    assert "mano" in capfd.readouterr().out
    for flags in ((), ("--ema",)):
        out = tmp_path / f"out{len(flags)}"
        words = ["convert", "export", str(whole), "--output", str(out), "--to", "hrm_text"]
        assert main([*words, "--no-tokenizer", *flags]) == 0
    plain, average = (
        (tmp_path / f"out{count}" / "model.safetensors").read_bytes() for count in (0, 1)
    )
    assert len(plain) == len(average)
    assert plain != average


def test_generation_is_the_full_forward_pass_at_every_exit(make_run):
    model = make_run(n_layers=2, low_cycles=2, prefix_lm=False).model.double()
    check_generation(model, steps=3, leaves=Confidence(0.03))


@torch.no_grad()
@pytest.mark.parametrize("of_chats", [False, True])
def test_prompts_of_other_lengths_have_prefixes_of_their_own(make_run, of_chats):
    model = make_run(n_layers=2, low_cycles=2).model.double()
    prefixes = (4, 1, 6) if of_chats else (None,) * 3
    requests = [
        Request(prompt=prompt, max_new_tokens=6, prefix_tokens=prefix)
        for prompt, prefix in zip(prompts(9, 2, 6), prefixes, strict=True)
    ]
    together = Engine(model).complete(requests)
    for request, completion in zip(requests, together, strict=True):
        ids = [*request.prompt, *completion.tokens]
        prefix = torch.arange(len(ids))[None] < (request.prefix_tokens or len(request.prompt))
        states = model(torch.tensor([ids]), columns={"prefix": prefix}).hidden_RBLD
        said = model.readout(states[-1])[0, len(request.prompt) - 1 : -1].argmax(-1).tolist()
        assert said == completion.tokens


@pytest.mark.usefixtures("alone")
def test_prefixes_for_a_model_without_them_are_refused(tmp_path: Path, capfd):
    words = ["train", "hrm_small", "--stage", "hrm_mano", "--dump-folder", str(tmp_path)]
    assert main([*words, "--model.no-prefix-lm"]) == 2
    assert "dataloader.prefix=True has no effect on model.family=hrm_text" in capfd.readouterr().err
    config = config_of(tmp_path / "run")
    config.dataloader.prefix = False
    with pytest.raises(UserError, match="the model reads prefix, and dataloader=TaskLoader"):
        train_run(config)
