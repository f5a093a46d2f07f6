"""Steps whose loss or gradient is not finite: skipped, counted, and never saved."""

from collections.abc import Mapping

import pytest
import torch

from tests.support.tiny import BATCH_TOKENS, tiny_config
from tests.training.test_trainer import built
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.errors import NonFiniteError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.trainer import LoopTrainer

STEPS = 6

pytestmark = pytest.mark.usefixtures("alone")


def _poison(trainer: LoopTrainer, steps: set[int]) -> None:
    """Make the loss of the given steps infinite through the entropy weight."""
    real = trainer.loss_fn.set_schedules

    def set_schedules(values: Mapping[str, float]) -> None:
        real({"entropy_weight": float("inf")} if trainer.step in steps else values)

    trainer.loss_fn.set_schedules = set_schedules


def test_a_non_finite_step_is_skipped_and_training_goes_on(source, tmp_path):
    trainer = built(tiny_config(source, tmp_path / "run", steps=STEPS))
    _poison(trainer, {2})
    weight, updates = trainer.model.norm.weight, []
    real_step = trainer.optimizers.step

    def step() -> None:
        before = weight.detach().clone()
        real_step()
        if not torch.equal(before, weight):
            updates.append(trainer.step)

    trainer.optimizers.step = step
    trainer.train()
    trainer.close()
    assert updates == [1, 3, 4, 5, 6]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    records = RunDirectory(tmp_path / "run").read_metrics()
    assert records[1]["loss"] is None
    assert records[-1]["tokens"] == STEPS * BATCH_TOKENS  # the windows count as consumed


def test_too_many_non_finite_steps_end_the_run(source, tmp_path):
    config = tiny_config(source, tmp_path / "run", steps=STEPS)
    config.max_skipped_steps = 2
    trainer = built(config)
    _poison(trainer, {3, 4, 5, 6})
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        trainer.train()
    trainer.close()
    assert trainer.step == 4
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2]


def test_non_finite_weights_are_never_saved(source, tmp_path):
    trainer = built(tiny_config(source, tmp_path / "run", steps=STEPS))

    class Poison(Callback):
        def on_step_end(self, trainer, metrics):
            if trainer.step == 4:
                with torch.no_grad():
                    trainer.model.norm.weight[0] = float("nan")

    trainer.callbacks.append(Poison())
    with pytest.raises(NonFiniteError, match=r"norm\.weight is not finite at step 4"):
        trainer.train()
    trainer.close()
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2]
