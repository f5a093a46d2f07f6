"""Six ways to train a small looped model on rewards, at equal numbers of prompts and answers.

    titan-loop train rewards --debug.seed 1 --dataloader.seed 1   a parent and all arms of a seed
    bash tools/rewards.sh                                         all seeds, and their tables

| stage | answers | update |
|---|---|---|
| `parent` | – | Ouro's Stage I on right answers |
| `afterwards` | full depth | Ouro's first attempt: `cumulative_loss.py` |
| `fixed` | full depth | Ouro's second: at step R |
| `exits` | exits drawn from the gate | at each token's exit |
| `action` | the same | with log p of the exit |
| `priced` | the same, with a price for each step | the same |
| `rltt` | full depth | Σ_r log π_r / R (arXiv 2602.10520) |

One layer of width 64 (43 thousand parameters), R = 4, on arithmetic whose steps are written down.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.rl.reward_loss import RewardLoss
from titan_loop.rl.rollouts import RolloutLoader
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import cosine, run
from .asked_table import AskedTable
from .cumulative_loss import CumulativeLoss
from .written_arithmetic import WrittenArithmetic

TASK = WrittenArithmetic(modulus=5, max_operations=6)
HARDEST = WrittenArithmetic(modulus=5, max_operations=6, fewest_operations=6)
STEPS = 4
PARENT_TOKENS = 1_100_000
PROMPTS, GROUP, UPDATES = 32, 8, 80
PRICE = 0.5


def _row(stage: str, reading: str) -> dict[str, str]:
    return {"stage": stage, "reading": reading}


_OWN_EXITS = {
    "parent": "sampled",
    "afterwards": "q:0.5",  # the threshold that its exits were found by
    "fixed": "full",
    "exits": "sampled",
    "action": "sampled",
    "priced": "sampled",
    "rltt": "full",
}
_ROWS = {f"{stage}, {reading}": _row(stage, reading) for stage, reading in _OWN_EXITS.items()}
_TASK = {"task": WrittenArithmetic.name}
_SHARES = {
    "greedy": {"metric": "greedy"},
    "temperature 1": {"metric": "sampled"},
    "pass@8": {"metric": "any_right"},
}
TABLES = {
    "rewards": [
        AskedTable(
            name="own_exits",
            title="% right, read as trained",
            rows=_ROWS,
            columns=_SHARES,
            everywhere=_TASK,
            less="parent, sampled",
        ),
        AskedTable(
            name="full_depth",
            title="% right at full depth",
            rows={stage: _row(stage, "full") for stage in _OWN_EXITS},
            columns=_SHARES,
            everywhere=_TASK,
            less="parent",
        ),
        ResultTable(
            name="steps",
            title="mean steps of an answer's token",
            rows=_ROWS,
            columns={"greedy": {"metric": "steps"}, "temperature 1": {"metric": "sampled_steps"}},
            everywhere=_TASK,
            factor=1.0,
            digits=2,
        ),
        ResultTable(
            name="flops",
            title="10¹² FLOPs of training",
            rows={stage: {"stage": stage} for stage in _OWN_EXITS if stage != "parent"},
            columns={
                "rollouts": {"metric": "rollout_flops"},
                "updates": {"metric": "update_flops"},
            },
            everywhere={**_TASK, "reading": "training"},
            factor=1e-12,
            digits=3,
        ),
    ]
}


class Arm(NamedTuple):
    """An arm's exit policy, objective, and price of a recurrent step."""

    exit: str
    loss: RewardLoss.Config
    price: float = 0.0


ARMS: Mapping[str, Arm] = {
    "afterwards": Arm("full", CumulativeLoss.Config()),
    "fixed": Arm("full", RewardLoss.Config()),
    "exits": Arm("sampled", RewardLoss.Config()),
    "action": Arm("sampled", RewardLoss.Config(exit_action=True)),
    "priced": Arm("sampled", RewardLoss.Config(exit_action=True), PRICE),
    "rltt": Arm("full", RewardLoss.Config(trajectory="uniform")),
}


def rewards() -> Recipe:
    """A layer that answers in several tokens, and six ways to train it on rewards."""
    stages = [Stage(name="parent", config=_parent())]
    stages += [
        Stage(name=name, parent="parent", config=_rewarded(arm)) for name, arm in ARMS.items()
    ]
    return Recipe(name="rewards", stages=stages)


def _model() -> OuroOptions:
    return OuroOptions(
        size="debugmodel", n_layers=1, hidden_dim=128, recurrent_steps=STEPS, exit_gate=True
    )


def _parent() -> LoopTrainer.Config:
    return run(
        _model(),
        TaskLoader.Config(task=TASK),
        tokens=PARENT_TOKENS,
        window=64,
        windows=32,
        rate=cosine(1e-2, PARENT_TOKENS, warmup=100_000),
        steps=STEPS,
        adamw=AdamWConfig(beta2=0.98, eps=1e-6),
        entropy_weight=Schedule.constant(0.05),
        suite=SuiteConfig(interval=200, tasks=[TASK.name], depths=[1, 2, 3, 4], questions=500),
        save_every=100_000,
        log_every=50,
        optimizer="muon",
    )


def _rewarded(arm: Arm) -> LoopTrainer.Config:
    window = HARDEST.longest_example - 1
    windows = PROMPTS * GROUP
    tokens = UPDATES * windows * window
    settings: dict[str, Any] = {"group": GROUP, "redraws": 0, "normaliser": "sequence"}
    config = run(
        _model(),
        RolloutLoader.Config(
            task=HARDEST,
            exit=arm.exit,
            step_price=arm.price,
            rows=windows,
            log_rollouts=True,
            **settings,
        ),
        tokens=tokens,
        window=window,
        windows=windows,
        rate=Schedule.warmup_constant(1e-3, warmup_tokens=4 * windows * window),
        steps=STEPS,
        loss=arm.loss,
        adamw=AdamWConfig(beta2=0.95, weight_decay=0.0),
        save_every=UPDATES,
        log_every=5,
        optimizer="muon",
    )
    config.checkpoint.carry.optimizer = False
    return config
