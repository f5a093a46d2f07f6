"""Arithmetic and hops of `physics_small`, asked 1,000 questions without a twin in training.

    physics_exams    every stage at most half an hour on one core

| stages | comparison |
|---|---|
| `mano_KxL` | arithmetic modulo 7 by K layers visited L times, with Muon at 1e-2 |
| `mano_1x1_more` | one layer visited once, on four times the tokens |
| `…_RATE` | the same at other rates, to choose one on `tuning_3_operations` |
| `mano5_KxL_RATE` | at most five operations: the paper's gap grows with their number |
| `mano_KxL_dW_RATE` | other widths: does the gap between a loop and layers grow with width? |
| `hops_rL_P` | three hops after P % of 9,216 questions, by two layers visited L times |
| `hops_rL_P_RATE` | the same at other rates, to choose one on `tuning_3_hops` |

Here `hops_…` have nine relations and in `physics_small` eight, so the worlds differ.
Every exam has a second one, `tuning_…`, of other questions; rates, decay and length are chosen on
that. Seeds draw the weights and the order of the data. `--dataloader.task.modulus 23` is the
paper's modulus, here untried.

Numbers of the recipes `physics_small` (`mano_…`, `hops_…`), `adaptive_small`, `hrm_small` and
`xllm_small` (`mano_…`) rest on the older exam of `physics_small`: modulo 5, 674 different
expressions of which 632 have a twin in training, and three hops of which 11 to 59 % do.

    titan-loop train physics_exams --stage mano_1x4 --debug.seed 1 --dataloader.seed 1
    bash tools/physics.sh --exams       all stages, and their tables

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B, scaled down.
"""

from copy import deepcopy
from dataclasses import replace

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.task import Task
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, cosine
from .commuted_mano import CommutedMano
from .layered_paths import LayeredPaths
from .recipes import MANO_PAPER, grid_name
from .small import (
    HOPS_LOOPS,
    HOPS_QUESTIONS,
    HOPS_SHARES,
    MANO_ROWS,
    WARMUP_TOKENS,
    physics_small,
)

MANO = CommutedMano(modulus=7, max_operations=3)
LONGER = CommutedMano(modulus=7, max_operations=5)
REPORTED, TUNING = MANO.strata
RATE = 1e-2
RATES = {"125e-5": 1.25e-3, "25e-4": 2.5e-3, "5e-3": 5e-3, "1e-2": RATE, "2e-2": 2e-2}
"""Name → largest learning rate; neighbours are a factor of 2 apart."""

TUNED = {
    "1x1": (grid_name(1, 1), 1),
    "1x4": (grid_name(1, 4), 4),
    "4x1": (grid_name(4, 1), 1),
    "1x1_more": (f"{grid_name(1, 1)}, four times the tokens", 1),
}
"""Arm that a front page compares → its row in the tables, and visits."""

WIDTHS = {32: ("25e-4", "5e-3", "1e-2"), 96: ("25e-4", "5e-3")}
"""Width → names of rates around the best one of width 64; heads have 16 numbers, F is 3 D."""

HOPS_TUNED, HOPS_TUNED_SHARES = (1, 4), (25, 50)
LONGER_ARMS, LONGER_RATES = ("1x4", "4x1"), ("25e-4", "5e-3", "1e-2")

TABLES = {
    "physics_exams": [
        ResultTable(
            name="mano",
            title="% right of three operations (paper: 2⊗1, 2⊗6, 12⊗1, 10 operations)",
            rows={
                **{grid_name(k, loops): at(f"mano_{k}x{loops}", loops) for k, loops in MANO_ROWS},
                TUNED["1x1_more"][0]: at("mano_1x1_more", 1),
            },
            columns={"mano": {"stratum": REPORTED}},
            everywhere={"task": MANO.name, "metric": "acc,none"},
            paper={
                grid_name(*row): {"mano": MANO_PAPER[theirs][0]}
                for row, theirs in MANO_ROWS.items()
                if theirs is not None
            },
        ),
        ResultTable(
            name="rates",
            title="% right of the questions for tuning",
            rows={row: at(f"mano_{arm}", visits) for arm, (row, visits) in TUNED.items()},
            columns={
                str(rate): {} if rate == RATE else {"stage": name} for name, rate in RATES.items()
            },
            everywhere={"task": MANO.name, "stratum": TUNING, "metric": "acc,none"},
            columns_are="largest learning rate",
        ),
        ResultTable(
            name="longer",
            title="% right of five operations",
            rows={TUNED[arm][0]: at(f"mano5_{arm}", TUNED[arm][1]) for arm in LONGER_ARMS},
            columns={
                f"{name}{', tuning' * tuning}": {"stage": name, "stratum": stratum}
                for name in LONGER_RATES
                for tuning, stratum in enumerate(LONGER.strata)
            },
            everywhere={"task": LONGER.name, "metric": "acc,none"},
        ),
        ResultTable(
            name="widths",
            title="% right of three operations by width",
            rows={TUNED[arm][0]: at(f"mano_{arm}", TUNED[arm][1]) for arm in LONGER_ARMS},
            columns={
                f"D {width}, {name}{', tuning' * tuning}": {
                    "stage": f"d{width}_{name}",
                    "stratum": stratum,
                }
                for width, names in WIDTHS.items()
                for name in names
                for tuning, stratum in enumerate(MANO.strata)
            },
            everywhere={"task": MANO.name, "metric": "acc,none"},
        ),
        ResultTable(
            name="hops",
            title="% of the held-out questions right",
            rows={f"2⊗{r}": at(f"hops_r{r}", r) for r in HOPS_LOOPS},
            columns={f"{share} %": {"stage": f"{share}"} for share in HOPS_SHARES},
            everywhere={
                "task": LayeredPaths.name,
                "stratum": "held_out_3_hops",
                "metric": "acc,none",
            },
            columns_are="of the questions trained on",
        ),
        ResultTable(
            name="hops_rates",
            title="% of the questions for tuning right",
            rows={
                f"2⊗{r}, {share} %": at(f"hops_r{r}_{share}", r)
                for r in HOPS_TUNED
                for share in HOPS_TUNED_SHARES
            },
            columns={
                str(rate): {} if rate == RATE else {"stage": name} for name, rate in RATES.items()
            },
            everywhere={
                "task": LayeredPaths.name,
                "stratum": "tuning_3_hops",
                "metric": "acc,none",
            },
            columns_are="largest learning rate",
        ),
    ]
}


def physics_exams() -> Recipe:
    """Arithmetic and hops for one core, with 1,000 exam questions that have no twin in training."""
    known = {stage.name: stage.config for stage in physics_small().stages}
    arithmetic = {f"mano_{k}x{loops}": known[f"mano_{k}x{loops}"] for k, loops in MANO_ROWS}
    more = deepcopy(arithmetic["mano_1x1"])
    more.total_tokens *= 4
    more.learning_rate = cosine(RATE, more.total_tokens, warmup=WARMUP_TOKENS)
    arithmetic["mano_1x1_more"] = more
    stages = [Stage(name=name, config=_asked(config, MANO)) for name, config in arithmetic.items()]
    for arm in TUNED:
        for name, rate in RATES.items():
            if rate != RATE:
                config = _asked(arithmetic[f"mano_{arm}"], MANO)
                config.learning_rate = cosine(rate, config.total_tokens, warmup=WARMUP_TOKENS)
                stages.append(Stage(name=f"mano_{arm}_{name}", config=config))
    for arm in LONGER_ARMS:
        for name in LONGER_RATES:
            config = _asked(arithmetic[f"mano_{arm}"], LONGER)
            config.learning_rate = cosine(RATES[name], config.total_tokens, warmup=WARMUP_TOKENS)
            stages.append(Stage(name=f"mano5_{arm}_{name}", config=config))
    for width, names in WIDTHS.items():
        for arm in LONGER_ARMS:
            for name in names:
                config = _asked(arithmetic[f"mano_{arm}"], MANO)
                config.learning_rate = cosine(
                    RATES[name], config.total_tokens, warmup=WARMUP_TOKENS
                )
                config.model = replace(
                    config.model, dim=width, n_heads=width // 16, hidden_dim=3 * width
                )
                stages.append(Stage(name=f"mano_{arm}_d{width}_{name}", config=config))
    for loops in HOPS_LOOPS:
        for share in HOPS_SHARES:
            name = f"hops_r{loops}_{share}"
            task = LayeredPaths(
                people=20, relations=9, trained_questions=HOPS_QUESTIONS * share // 100
            )
            stages.append(Stage(name=name, config=_asked(known[name], task)))
            if loops in HOPS_TUNED and share in HOPS_TUNED_SHARES:
                for rate_name, rate in RATES.items():
                    if rate != RATE:
                        config = _asked(known[name], task)
                        config.learning_rate = cosine(
                            rate, config.total_tokens, warmup=WARMUP_TOKENS
                        )
                        stages.append(Stage(name=f"{name}_{rate_name}", config=config))
    return Recipe(name="physics_exams", stages=stages)


def _asked(config: LoopTrainer.Config, task: Task) -> LoopTrainer.Config:
    """Return a stage of `physics_small` that trains on another task."""
    config = deepcopy(config)
    config.dataloader = TaskLoader.Config(task=task)
    config.suite.tasks = [task.name]
    return config
