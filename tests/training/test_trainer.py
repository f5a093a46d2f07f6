"""One process: schedules reach the step, metrics the file, kills and NaNs do no harm."""

import json
from pathlib import Path

import pytest
import titan_loop.compat as compat
import torch

from tests.support.tiny import BATCH_TOKENS, BATCH_WINDOWS, SEQ_LEN, tiny_config, train_run
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

STEPS = 6


pytestmark = pytest.mark.usefixtures("alone")


def built(config: LoopTrainer.Config) -> LoopTrainer:
    compat.start_runtime()
    return LoopTrainer(resolve(config, 1))


def whole_batches(source: Path, run: Path, *, steps: int = STEPS) -> LoopTrainer.Config:
    """Return `tiny_config` without accumulation, for tests of something else."""
    config = tiny_config(source, run, steps=steps)
    config.training.local_batch_size = BATCH_WINDOWS
    return config


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in RunDirectory(run).read_metrics()}


def test_a_run_writes_what_its_schedules_say(source, tmp_path):
    config = tiny_config(source, tmp_path / "run", steps=STEPS)
    learning_rate, entropy_weight = config.learning_rate, config.entropy_weight
    train_run(config)
    model = resolve(config, 1).model
    records = RunDirectory(tmp_path / "run").read_metrics()
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["tokens"] for r in records] == [BATCH_TOKENS * i for i in range(1, STEPS + 1)]
    assert [r["recurrent_steps"] for r in records] == [4, 4, 4, 2, 2, 2]
    for record in records:
        before = record["tokens"] - BATCH_TOKENS
        assert record["lr"] == learning_rate(before)
        assert record["entropy_weight"] == entropy_weight(before)
        assert record["windows_consumed"] == record["step"] * BATCH_WINDOWS
        steps = record["recurrent_steps"]
        pmf = [record[f"exit/pmf_{r}"] for r in range(1, steps + 1)]
        assert sum(pmf) == pytest.approx(1, abs=1e-5)
        expected = sum(r * p for r, p in enumerate(pmf, start=1))
        assert record["exit/mean_step"] == pytest.approx(expected, abs=1e-4)
        assert f"ce/step_{steps}" in record
        assert f"ce/step_{steps + 1}" not in record
        assert record["flops_per_token"] == model.training_flops(SEQ_LEN, steps).total
        assert record["mfu"] is None
        assert record["peak_memory_bytes"] > 50e6
        assert record["tokens_per_second"] > 0
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert resolved["total_tokens"] == STEPS * BATCH_TOKENS
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]


def test_the_backward_pass_reaches_further_as_it_grows(source, tmp_path, monkeypatch):
    reached = []
    forward = LoopDecoder.forward

    def watched(model, *args, **named):
        reached.append(named["backward_steps"])
        return forward(model, *args, **named)

    monkeypatch.setattr(LoopDecoder, "forward", watched)
    config = whole_batches(source, tmp_path / "run", steps=4)
    config.model.tie_weights = True
    config.recurrence.backward_growth = Schedule.steps([(0, 1), (2 * BATCH_TOKENS, 3)])
    train_run(config)
    assert reached == [1, 1, 3, 3]


def test_random_recurrent_steps_and_dropout_are_drawn_again_on_resume(source, tmp_path):
    def config(run: str, steps: int) -> LoopTrainer.Config:
        result = tiny_config(source, tmp_path / run, steps=STEPS + 2)
        result.training.local_batch_size = BATCH_WINDOWS // 2
        result.recurrence.poisson = True
        result.recurrence.max_steps = 5
        result.model.dropout = 0.3
        result.training.steps = steps
        return result

    for run, limits in (("whole", [0]), ("broken", [4, 0])):
        for limit in limits:
            train_run(config(run, limit))
    whole, broken = (
        [r["recurrent_steps"] for r in RunDirectory(tmp_path / run).read_metrics()]
        for run in ("whole", "broken")
    )
    assert broken == whole
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert len(set(whole[4:])) > 1  # steps after the restart, whose draws differ
    assert max(whole) <= 5


def test_a_run_resumed_with_another_batch_still_ends_at_its_tokens(source, tmp_path, capfd):
    first = tiny_config(source, tmp_path / "run", steps=STEPS)
    first.training.steps = 4
    train_run(first)
    train_run(first)
    assert "training.steps=4 ends the run before its last token" in "".join(capfd.readouterr())
    second = tiny_config(source, tmp_path / "run", steps=STEPS)
    second.batch.global_batch_tokens = Schedule.constant(BATCH_TOKENS // 2)
    train_run(second)
    records = RunDirectory(tmp_path / "run").read_metrics()
    assert [r["tokens"] for r in records[3:]] == [
        BATCH_TOKENS * halves // 2 for halves in (8, 9, 10, 11, 12)
    ]
    assert committed_steps(tmp_path / "run" / "checkpoints")[-1] == 8
    train_run(second)  # nothing left: returns at once
    assert len(RunDirectory(tmp_path / "run").read_metrics()) == len(records)


def test_a_collapse_is_warned_of_once_until_the_gate_recovers(source, tmp_path, monkeypatch):
    config = whole_batches(source, tmp_path / "run", steps=STEPS)
    config.checkpoint.enable = False
    trainer = built(config)
    warnings: list[tuple] = []
    monkeypatch.setattr(
        "titan_loop.training.trainer.logger.warning",
        lambda *arguments, **_: warnings.append(arguments),
    )

    class Gate(Callback):
        def on_step_end(self, trainer, metrics):
            """Leave always after the first step, but for steps 3 and 4."""
            with torch.no_grad():
                trainer.model.exit_gate.bias.fill_(0.0 if trainer.step in (2, 3) else 50.0)

    trainer.callbacks.append(Gate())
    trainer.train()
    trainer.close()
    assert [step for text, step, *_ in warnings if text == "step %d: %s"] == [2, 5]
