"""A rehearsed stage whose experts are spread sends tokens to them and back at every visit."""

import pytest

from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
    step_of,
)
from tests.support.tiny import SEQ_LEN
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

STEPS, TOP_K = 2, 2


def sparse(**parallelism: int) -> LoopTrainer.Config:
    config = stage(**parallelism)
    config.model = MoEOptions(top_k=TOP_K, dense_layers=(1,), vocab_size=512)
    config.loss, config.recurrence.steps = MoELoss.Config(), Schedule.constant(STEPS)
    return config


def test_spread_experts_exchange_tokens_at_every_visit():
    config = sparse(expert_parallel=4)
    config.optimizer.name = "muon"
    measured = step_of(config)
    again = measured.moved_again["all-to-all"]
    # Counts, tokens and results forward, the gradients of the last two backward.
    assert again.count == STEPS * 5
    rows, width = SEQ_LEN * TOP_K, config.model.dim or 64
    counts = 8 * 8  # an int64 of each expert
    exchanged = STEPS * (4 * rows * width * 2 + counts) * 3 / 4  # bf16; a quarter stays here
    assert again.received_bytes == pytest.approx(exchanged, rel=1e-6)
    muons = 2  # once an update, to the owners of matrices and back
    assert measured.moved["all-to-all"].count == measured.micro_batches * again.count + muons
