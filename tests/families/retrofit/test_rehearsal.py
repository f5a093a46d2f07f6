"""Rehearsals of retrofitted stages: weights are reduced once, and a teacher is held."""

from tests.families.retrofit.conftest import Made
from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
    step_of,
)
from titan_loop.families.retrofit.distillation import DistillationLoss
from titan_loop.families.retrofit.model import RetrofitOptions
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def identity(teacher: Made | None = None) -> LoopTrainer.Config:
    config = stage()
    config.model = RetrofitOptions(n_layers=3, prelude_layers=1, coda_layers=1, bridge=True)
    config.model.vocab_size, config.model.attention = 300, "sdpa"
    config.recurrence.steps = Schedule.constant(1)
    if teacher is not None:
        config.loss = DistillationLoss.Config(teacher=str(teacher.run))
    return config


def test_a_teacher_is_in_the_peak_and_is_not_moved(dense: Made):
    alone, taught = step_of(identity()), step_of(identity(dense))
    weights = sum(parameter.numel() for parameter in dense.model.parameters())
    assert taught.peak_bytes - alone.peak_bytes >= 2 * weights  # in bf16
    assert taught.moved == alone.moved
