"""Cases of HRM-Text's two stacks."""

from functools import partial
from pathlib import Path

from tests.contracts.families import Compiled, Contract, Folder, Generated, Run
from tests.contracts.runs import BATCH, small_run
from tests.distributed.test_parity import HELD, Case
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.inference.exit_policy import Confidence
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from titan_loop.training.weight_average import WeightAverageConfig

SMALL = {"n_layers": 2, "low_cycles": 2}
case = partial(Case, family=HrmTextOptions, steps=(2, 1), options=tuple(SMALL.items()))
OTHER = {
    **SMALL,
    "recurrent_steps": 3, "tie_weights": True, "rope_theta": 500.0, "norm_eps": 1e-5,
    "embedding_scale": 3.0, "prefix_lm": False,
}  # fmt: skip


def run(folder: Path, world: int) -> LoopTrainer.Config:
    """Return a run whose backward pass grows from 2 passes to all."""
    config = small_run(folder, HrmTextOptions(**SMALL), steps=4)
    config.dataloader = TaskLoader.Config(task=Mano(5, 3), prefix=True)
    growth = Schedule.steps([(0, 2), (BATCH, 4), (3 * BATCH, 6)])
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(2), backward_growth=growth)
    config.suite = SuiteConfig(interval=4, tasks=["mano"], depths=[1, 2], questions=8)
    config.ema = WeightAverageConfig(decay=0.5)
    return config


CONTRACT = Contract(
    parity={
        "all": (case(exit_gate=False, options=()), "tp2"),
        "truncated": (
            case(exit_gate=False, steps=(3, 2), backward_steps=4, checkpointing="recurrent-step"),
            "cp2",
        ),
        "held-tied": (
            case(
                tie_weights=True, exit_gate=False, fsdp=HELD, checkpointing="full", backward_steps=3
            ),
            "dp2",
        ),
        "gated": (case(checkpointing="selective"), "tp2-no-sp"),
    },
    compiled={"two stacks": Compiled(HrmTextOptions(**SMALL), steps=2)},
    generated={"causal": Generated(HrmTextOptions(**SMALL, prefix_lm=False), Confidence(0.1))},
    runs={"prefixes": Run(run)},
    folders={
        "hrm_text": Folder(
            "hrm_text",
            [{}, OTHER],
            transformers=5,
            refused=[
                ({"num_hidden_layers": 12}, "num_hidden_layers=12 is a cache of other cycles: H_c"),
                ({"prefix_lm": "yes"}, "prefix_lm='yes' must be true or false"),
                ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported"),
            ],
            unfit=[({"exit_gate": True}, (), "model.exit_gate=True: the HRM-Text format has no")],
        )
    },
    refused=[
        (HrmTextOptions(n_layers=3), "model.n_layers=3 must be even: half are the low stack"),
        (HrmTextOptions(n_kv_heads=2), "model.n_kv_heads=2 must be n_heads=4"),
    ],
)
