"""Cases of mixtures of experts."""

from pathlib import Path

from tests.contracts.families import Compiled, Contract, Folder, Generated, Run
from tests.contracts.runs import BATCH, small_run
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

EXPERTS = {"experts": 4, "expert_hidden_dim": 32}
SOFTMAX = {**EXPERTS, "router": "softmax"}
LOADS = [f"experts/load/layer_2_step_{step}" for step in (1, 2)]


def run(folder: Path, world: int) -> LoopTrainer.Config:
    """Return a run with experts on all ranks; R falls from 4 to 2."""
    config = small_run(folder, MoEOptions(experts=4, dense_layers=(1,), bias_rate=0.01), steps=4)
    config.loss = MoELoss.Config(balance_weight=1e-3, router_z_weight=1e-4)
    config.recurrence = RecurrenceConfig(steps=Schedule.steps([(0, 4), (2 * BATCH, 2)]))
    config.optimizer.name = "muon"
    config.ema.decay = 0.9
    config.parallelism.expert_parallel_degree = world
    return config


def rehearsed(config: LoopTrainer.Config) -> None:
    """A mixture in the second of two layers."""
    config.model = MoEOptions(top_k=2, dense_layers=(1,), vocab_size=512)
    config.loss, config.recurrence.steps = MoELoss.Config(), Schedule.constant(2)


CONTRACT = Contract(
    compiled={"attentions": Compiled(MoEOptions(n_layers=1, attentions=3), graphs=6)},
    generated={
        "own routers": Generated(
            MoEOptions(routers=2, attentions=2, exit_gate=True, coda_layers=1, dim=32)
        )
    },
    rehearsed={"experts": rehearsed},
    runs={
        "experts": Run(
            run, equal=(*LOADS, "experts/unused"), close=("experts/balance", "experts/router_z")
        )
    },
    folders={
        "ernie4_5_moe-unrolled": Folder(
            "moe",
            [SOFTMAX],
            comes_back=False,
            unfit=[
                ({"score_scale": 2.0}, (), "model.score_scale=2.0: the Ernie 4.5 MoE format supp"),
                ({"dense_layers": (1,)}, (), "Ernie 4.5 MoE allows only leading and trailing la"),
            ],
        ),
        "glm4_moe-unrolled": Folder(
            "moe",
            [EXPERTS],
            comes_back=False,
            unfit=[
                (
                    {"dense_layers": (2,)},
                    (),
                    "model.dense_layers=[2]: GLM-4 MoE allows only leading layers of the 6 unroll",
                ),
                (
                    {"norm_placement": "every_step"},
                    (),
                    "model.norm_placement=every_step: the GLM-4 MoE format has no norm",
                ),
            ],
        ),
        "mixtral-unrolled": Folder("moe", [SOFTMAX], comes_back=False),
    },
    refused=[
        (MoEOptions(top_k=9), "model.top_k=9 must be at most model.experts=8"),
        (MoEOptions(expert_hidden_dim=12), "expert_hidden_dim=12 must be a multiple of 8"),
        (MoEOptions(dense_layers=(1, 2)), "leave one with experts"),
        (MoEOptions(dense_layers=(3,)), "must name some of the layers 1 to 2"),
    ],
)
