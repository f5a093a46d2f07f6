"""The gain of loops in miniature: Ouro's section 6 and its two studies of text, for one core.

    physics_small    every stage at most half an hour on one core

| stages | comparison |
|---|---|
| `mano_KxL` | arithmetic by K layers visited L times, with Muon, which wins `depth_pays` |
| `capo_lL` | bits of 3,000 biographies that a layer visited L times knows |
| `hops_rL_P` | three hops after P % of the questions, by two layers visited L times, with Muon |
| `scaling_dD_rR` | widths and R of the quick start's layer, for a scaling law |
| `prior_P` | that layer with a uniform and with geometric priors, losses in one form |

The last two read the quick start's corpus. `bash tools/physics.sh` trains all stages, prints their
tables and fits the law.

Deviations: exposures of a biography are Poisson numbers, since people are drawn with replacement.
Windows of 64 tokens cut off 8 % of Mano's answers after one operation and 13 % after three.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendices A, B and D, scaled down.
"""

from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.task import Task
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, bits_table, by_source, cosine, run, text
from .capo import Capo
from .layered_qa import LayeredQA
from .recipes import MANO_PAPER, grid_name

MANO = Mano(modulus=5, max_operations=3)
MANO_ROWS = {
    (1, 1): (2, 1),
    (1, 2): None,
    (1, 4): (2, 6),
    (2, 1): None,
    (2, 2): None,
    (4, 1): (12, 1),
}
"""Layers and visits here → those of the paper's row that answers the same question, if any."""

CAPO = Capo(
    people=3_000,
    first_names=20,
    middle_names=20,
    last_names=50,
    years=20,
    cities=50,
    universities=50,
    majors=30,
    employers=50,
)
CAPO_LOOPS = (1, 4)

HOPS_LOOPS = (1, 2, 4)
HOPS_SHARES = (10, 25, 50, 100)
HOPS_QUESTIONS = 9_216
"""Number of questions behind 100 %; 1,024 of the 10,240 are left for the exam."""

SCALING_DIMS, SCALING_STEPS = (48, 72, 96), (1, 2, 4)
PRIORS = ("uniform", 0.1, 0.3, 0.5, 0.7)
TEXT_TOKENS = 1_500_000
WARMUP_TOKENS = 200_000  # of generated tasks

TABLES = {
    "physics_small": [
        ResultTable(
            name="mano",
            title="% right of three operations (paper: 2⊗1, 2⊗6, 12⊗1, 10 operations)",
            rows={grid_name(k, loops): at(f"mano_{k}x{loops}", loops) for k, loops in MANO_ROWS},
            columns={"mano": {"task": "mano", "metric": "acc,none"}},
            paper={
                grid_name(*row): {"mano": MANO_PAPER[theirs][0]}
                for row, theirs in MANO_ROWS.items()
                if theirs is not None
            },
            message="Where questions with operands swapped are in training, one layer answers "
            "{1⊗4|mano} % after four visits, four layers {4⊗1|mano} % (one seed; physics_exams has "
            "the others)",
        ),
        ResultTable(
            name="capo",
            title="bits of knowledge (paper: about 2 a parameter)",
            rows={f"1⊗{r}": at(f"capo_l{r}", r) for r in CAPO_LOOPS},
            columns={
                "a person": {"metric": "bits"},
                "a parameter": {"metric": "bits_per_parameter"},
                "a parameter of the layer": {"metric": "bits_per_inner_parameter"},
            },
            everywhere={"task": "capo/knowledge"},
            paper={f"1⊗{r}": {"a parameter": 2.0} for r in CAPO_LOOPS},
            factor=1.0,
            digits=2,
        ),
        ResultTable(
            name="hops",
            title="% of the held-out questions right",
            rows={f"2⊗{r}": at(f"hops_r{r}", r) for r in HOPS_LOOPS},
            columns={f"{share} %": {"stage": f"{share}"} for share in HOPS_SHARES},
            everywhere={"task": "layered_qa/held_out_3_hops", "metric": "acc,none"},
            columns_are="of the questions trained on",
        ),
        bits_table(
            "priors",
            "held-out bits per byte at R = 4",
            {f"{prior}": at(f"prior_{prior}", 4) for prior in PRIORS},
            by_source(),
        ),
    ]
}


def physics_small() -> Recipe:
    """Ouro's section 6 and its studies for one core: arithmetic, facts, hops, scaling, priors."""
    stages = [
        *(_mano(*row) for row in MANO_ROWS),
        *(_capo(loops) for loops in CAPO_LOOPS),
        *(_hops(loops, share) for loops in HOPS_LOOPS for share in HOPS_SHARES),
        *(_scaling(dim, steps) for dim in SCALING_DIMS for steps in SCALING_STEPS),
        *(_prior(prior) for prior in PRIORS),
    ]
    return Recipe(name="physics_small", stages=stages)


def _mano(layers: int, loops: int) -> Stage:
    config = _generated(MANO, layers, loops, rate=1e-2, tokens=8_000_000)
    config.optimizer.name = "muon"
    return Stage(name=f"mano_{layers}x{loops}", config=config)


def _capo(loops: int) -> Stage:
    config = _generated(CAPO, 1, loops, rate=4e-3, tokens=15_000_000, tie_weights=True)
    config.dataloader = TaskLoader.Config(task=CAPO, all_targets=True)
    config.training.seq_len, config.training.local_batch_size = 256, 4
    config.adamw.weight_decay = 0.02
    return Stage(name=f"capo_l{loops}", config=config)


def _hops(loops: int, share: int) -> Stage:
    questions = HOPS_QUESTIONS * share // 100
    task = LayeredQA(people=20, relations=8, trained_questions=questions)
    config = _generated(task, 2, loops, rate=1e-2, tokens=4_000_000)
    config.optimizer.name = "muon"
    return Stage(name=f"hops_r{loops}_{share}", config=config)


def _scaling(dim: int, steps: int) -> Stage:
    config = _text(dim, steps)
    config.learning_rate = Schedule.warmup_constant(5e-3, warmup_tokens=75_000)
    return Stage(name=f"scaling_d{dim}_r{steps}", config=config)


def _prior(prior: str | float) -> Stage:
    config = _text(96, 4)
    if isinstance(prior, float):
        config.loss = ExpectedExitLoss.Config(prior="geometric", geometric_eta=prior)
    return Stage(name=f"prior_{prior}", config=config)


def _generated(
    task: Task, layers: int, loops: int, *, rate: float, tokens: int, **model: Any
) -> LoopTrainer.Config:
    """Return a run at width 64 that minimises the loss of the last step."""
    return run(
        OuroOptions(
            size="debugmodel", n_layers=layers, recurrent_steps=loops, exit_gate=False, **model
        ),
        TaskLoader.Config(task=task),
        tokens=tokens,
        window=64,
        windows=16,
        rate=cosine(rate, tokens, warmup=WARMUP_TOKENS),
        steps=loops,
        adamw=AdamWConfig(beta2=0.98, eps=1e-6),
        suite=SuiteConfig(interval=1_000, tasks=[task.name], depths=[loops], questions=1_000),
        save_every=4_000,
        log_every=100,
    )


def _text(dim: int, steps: int) -> LoopTrainer.Config:
    """Return a run of the quick start's layer, with an exit gate if it loops."""
    return run(
        OuroOptions(
            size="quickstart",
            n_layers=1,
            dim=dim,
            hidden_dim=8 * dim // 3,
            recurrent_steps=steps,
            exit_gate=steps > 1,
        ),
        text(),
        tokens=TEXT_TOKENS,
        window=256,
        windows=4,
        rate=cosine(1e-2, TEXT_TOKENS, warmup=75_000),
        steps=steps,
        entropy_weight=Schedule.constant(0.1),
        held_out=HeldOutConfig(interval=10_000, depths=sorted({1, steps}), windows=64),
        save_every=10_000,
    )
