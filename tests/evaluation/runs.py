"""Runs whose checkpoints were written without training, and evaluations before the first step."""

from pathlib import Path
from typing import Any

from tests.inference.reference import make_model
from tests.support.tiny import SEQ_LEN, act_as_launched
from titan_loop.checkpoint.tensors import write_checkpoint
from titan_loop.data.source_card import SourceCard
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.evaluation.while_training import WhileTraining, evaluations
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.trainer import LoopTrainer

TOKENS_A_STEP, TOTAL_STEPS = 100, 9


def write_run_of(source: Path, path: Path, *others: Path) -> Path:
    """A run directory on sources, without checkpoints."""
    RunDirectory(path).create_or_open(
        ["test"],
        config={
            "model": {
                "family": "ouro",
                "size": "debugmodel",
                "vocab_size": SourceCard.read(source).vocab_size,
            },
            "training": {"seq_len": SEQ_LEN},
            "dataloader": {
                "mixture": [f"{path}=1" for path in (source, *others)],
                "seed": 0, "max_epochs": None, "when_exhausted": "stop",
            },
            "checkpoint": {"folder": "checkpoints"},
            "total_tokens": TOKENS_A_STEP * TOTAL_STEPS,
        },
    )  # fmt: skip
    return path


def write_checkpoint_of(
    run: Path, step: int, *, windows_consumed: int = 4, data: dict[str, Any] | None = None
) -> None:
    """A checkpoint of random weights; `data` is what its loader says of its sources."""
    vocabulary = RunDirectory(run).read_config()["model"]["vocab_size"]
    model = make_model(seed=step, vocab_size=vocabulary)
    write_checkpoint(
        RunDirectory(run).checkpoint(step),
        model.state_dict(),
        {
            "step": step,
            "trainer": {
                "step": step,
                "tokens": TOKENS_A_STEP * step,
                "recurrent_steps": 4,
                "architecture": model.config.architecture,
            },
            "data": {"windows_consumed": windows_consumed, "accepted": [], "data": data or {}},
            "lineage": {},
        },
    )


def ask_untrained(config: LoopTrainer.Config, world: int, layout: dict[str, int]) -> TaskReport:
    """What the one evaluation of a run finds before its first step, on this rank of `world`."""
    act_as_launched(world)
    config.parallelism.tensor_parallel_degree = layout.get("tp", 1)
    config.parallelism.context_parallel_degree = layout.get("cp", 1)
    trainer = LoopTrainer(resolve(config, world))
    (evaluation,) = evaluations(config)
    assert isinstance(evaluation, WhileTraining)
    evaluation.on_train_start(trainer)
    report = evaluation.ask(trainer)
    trainer.close()
    return report
