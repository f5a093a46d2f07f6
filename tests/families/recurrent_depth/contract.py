"""Cases of GPT-2's blocks, looped."""

from pathlib import Path

from tests.contracts.families import Contract, Generated, Run
from tests.distributed.test_parity import SEQ_LEN, Case
from tests.inference.reference import CONTEXT
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions
from titan_loop.inference.exit_policy import HiddenDifference
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def run(folder: Path, world: int) -> LoopTrainer.Config:
    """Return five steps of drawn R, promoted after the third."""
    config = load_recipe("recurrent_depth_small").stage("depth_dynamic").config
    batch = int(config.batch.global_batch_tokens(0))
    config.dump_folder, config.total_tokens = str(folder), 5 * batch
    config.training.local_batch_size //= 2
    config.learning_rate = Schedule.constant(1e-3)
    curriculum = config.dataloader.curriculum  # type: ignore[attr-defined]
    curriculum.interval, curriculum.accuracy, curriculum.questions = 3, 0.0, 16
    config.suite.interval, config.metrics.log_freq = 0, 1
    config.checkpoint.interval = 2
    return config


CONTRACT = Contract(
    parity={
        "learned": (
            Case(
                steps=(3, 1),
                tie_weights=True,
                exit_gate=False,
                options=(("positions", "learned"), ("learned_positions", SEQ_LEN)),
                family=RecurrentDepthOptions,
            ),
            "tp2-no-sp cp2",
        ),
    },
    generated={
        "learned": Generated(
            RecurrentDepthOptions(positions="learned", learned_positions=CONTEXT),
            HiddenDifference(1.6),
            steps=4,
        )
    },
    runs={"promoted": Run(run)},
    refused=[
        (RecurrentDepthOptions(exit_gate=True), "does not work with model.family=recurrent_depth"),
        (
            RecurrentDepthOptions(positions="learned"),
            "model.positions=learned needs model.learned_positions",
        ),
        (RecurrentDepthOptions(learned_positions=9), "model.learned_positions=9 has no effect"),
        (
            RecurrentDepthOptions(positions="learned", learned_positions=9),
            "model.learned_positions=9 is less than the 64 tokens of a window",
        ),
    ],
)
