"""The gain of loops: Ouro's section 6 as published; `physics_small.py` has it in miniature.

    ouro_capo         biographies by heart: bits a parameter with 1 and 4 loops
    ouro_mano         arithmetic: k layers visited l times, at three lengths of expressions
    ouro_multi_hop    questions of three hops over learned facts, by the number of trained questions

Stages of `ouro_capo` are A-B-lC_N: width 64·A with A heads, B layers, C loops, N thousand people;
of `ouro_mano` KxL_lN: K layers, L visits, expressions of up to N operations; of `ouro_multi_hop`
KxL_N: N thousand questions. The Mano results are the best of three seeds and four rates, of which
2e-4 is taken here. Of capacity and questions the paper has plots, no numbers: about 2 bits a
parameter at any depth, and fewer questions with more loops.

Not published, hence ours: the shapes of `ouro_capo` between 1M and 40M parameters; heads (16) and
feed-forward width (2,816) of the others; Ouro's layers where the paper has GPT-2's (Capo) or names
none; training on the answer alone, but on every token of a biography; the questions' decay (0.1).

Deviations: people are drawn with replacement, where the paper shows everybody 1,000 times: here a
person comes about 970 times whole and 70 times cut off at a window's end, as Poisson numbers. Of
Mano's answers windows cut off 0.4 % after one operation, 2, 3 and 5 % after 10, 16 and 24.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendices B.1 to B.3.
"""

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.task import Task
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, cosine, run
from .capo import Capo
from .commuted_mano import CommutedMano
from .layered_qa import LayeredQA

WINDOW = 1024

MANO_GRID = ((12, 1), (2, 1), (2, 6), (3, 1), (3, 4), (6, 1), (6, 2))
MANO_STEPS = {10: 80_000, 16: 110_000, 24: 200_000}
MANO_PAPER = {
    (12, 1): (93.6, 94.4, 34.8),
    (2, 1): (21.5, 8.4, 7.5),
    (2, 6): (98.1, 96.3, 78.0),
    (3, 1): (75.4, 29.8, 11.0),
    (3, 4): (97.9, 95.8, 92.2),
    (6, 1): (84.7, 59.5, 20.0),
    (6, 2): (93.4, 88.5, 35.1),
}

CAPO_SHAPES = ((2, 4), (4, 4), (8, 4), (8, 12))
CAPO_LOOPS = (1, 4)
CAPO_THOUSANDS = (20, 50, 100, 200, 500)
CAPO_EXPOSURES = 1_000
BIOGRAPHY_TOKENS = 38
"""Mean tokens of a biography, rounded up."""

HOPS_GRID = ((6, 1), (6, 2), (6, 4), (24, 1))
HOPS_THOUSANDS = tuple(range(20, 220, 20))


def grid_name(layers: int, loops: int) -> str:
    """Return the label of a row of a grid."""
    return f"{layers}⊗{loops}"


TABLES = {
    "ouro_capo": [
        ResultTable(
            name="bits",
            title="bits a parameter",
            rows={
                f"{heads}-{layers}-l{loops}": at(f"{heads}-{layers}-l{loops}", loops)
                for heads, layers in CAPO_SHAPES
                for loops in CAPO_LOOPS
            },
            columns={f"N = {count}K": {"stage": f"{count}"} for count in CAPO_THOUSANDS},
            everywhere={"task": "capo/knowledge", "metric": "bits_per_parameter"},
            factor=1.0,
            digits=2,
        )
    ],
    "ouro_mano": [
        ResultTable(
            name="accuracy",
            title="% right at the largest length",
            rows={grid_name(k, loops): at(f"{k}x{loops}", loops) for k, loops in MANO_GRID},
            columns={
                f"L = {length}": {"stage": f"l{length}", "stratum": f"{length}_operations"}
                for length in MANO_STEPS
            },
            everywhere={"task": CommutedMano.name, "metric": "acc,none"},
            paper={
                grid_name(*row): {
                    f"L = {length}": value for length, value in zip(MANO_STEPS, values, strict=True)
                }
                for row, values in MANO_PAPER.items()
            },
        )
    ],
    "ouro_multi_hop": [
        ResultTable(
            name="samples",
            title="% of the held-out questions right",
            rows={grid_name(k, loops): at(f"{k}x{loops}", loops) for k, loops in HOPS_GRID},
            columns={f"{count}K": {"stage": f"{count}"} for count in HOPS_THOUSANDS},
            everywhere={"task": "layered_qa/held_out_3_hops", "metric": "acc,none"},
            columns_are="different questions trained on",
        )
    ],
}


def ouro_capo() -> Recipe:
    """Biographies by heart, as published: 20K to 500K people, 1,000 exposures, 1 and 4 loops."""
    stages = []
    for count in CAPO_THOUSANDS:
        for heads, layers in CAPO_SHAPES:
            for loops in CAPO_LOOPS:
                model = OuroOptions(
                    size="53m",
                    n_layers=layers,
                    dim=64 * heads,
                    n_heads=heads,
                    hidden_dim=192 * heads,
                    recurrent_steps=loops,
                    exit_gate=False,
                    tie_weights=True,
                )
                task = Capo(people=1_000 * count)
                config = _published(
                    task,
                    model,
                    rate=1e-3,
                    window=512,
                    batch=192,
                    tokens=CAPO_EXPOSURES * 1_000 * count * BIOGRAPHY_TOKENS,
                )
                config.dataloader = TaskLoader.Config(task=task, all_targets=True)
                config.adamw.weight_decay = 0.02
                stages.append(Stage(name=f"{heads}-{layers}-l{loops}_{count}", config=config))
    return Recipe(name="ouro_capo", stages=stages)


def ouro_mano() -> Recipe:
    """Arithmetic on prefix expressions, as published: k layers visited l times, three lengths."""
    stages = []
    for length, steps in MANO_STEPS.items():
        for layers, loops in MANO_GRID:
            config = _published(
                CommutedMano(max_operations=length),
                _wide(layers, loops),
                rate=2e-4,
                batch=128,
                tokens=steps * 128 * WINDOW,
            )
            stages.append(Stage(name=f"{layers}x{loops}_l{length}", config=config))
    return Recipe(name="ouro_mano", stages=stages)


def ouro_multi_hop() -> Recipe:
    """Three hops over learned facts, as published: 1, 2, 4 loops and 20K to 200K questions."""
    stages = []
    for count in HOPS_THOUSANDS:
        for layers, loops in HOPS_GRID:
            config = _published(
                LayeredQA(trained_questions=1_000 * count),
                _wide(layers, loops),
                rate=5e-4,
                batch=2_048,
                tokens=20_000 * 2_048 * WINDOW,
            )
            stages.append(Stage(name=f"{layers}x{loops}_{count}", config=config))
    return Recipe(name="ouro_multi_hop", stages=stages)


def _wide(layers: int, loops: int) -> OuroOptions:
    """Return a model of width 1,024 that minimises the loss of the last step."""
    return OuroOptions(size="374m", n_layers=layers, recurrent_steps=loops, exit_gate=False)


def _published(
    task: Task, model: OuroOptions, *, rate: float, batch: int, tokens: int, window: int = WINDOW
) -> LoopTrainer.Config:
    """Return a run of batches of `batch` windows: 1,000 steps of warm-up, cosine to a tenth."""
    loops = model.recurrent_steps
    assert loops is not None
    return run(
        model,
        TaskLoader.Config(task=task),
        tokens=tokens,
        window=window,
        windows=batch,
        at_once=8,
        rate=cosine(rate, tokens, warmup=1_000 * batch * window),
        steps=loops,
        adamw=AdamWConfig(weight_decay=0.1, beta2=0.98, eps=1e-6),
        suite=SuiteConfig(interval=5_000, tasks=[task.name], depths=[loops], questions=3_000),
        save_every=5_000,
        max_norm=1.0,
    )
