"""What loops add: Ouro's section 6 as published; `physics_small.py` has it in miniature.

    ouro_mano         arithmetic: k layers visited l times, at three lengths of expressions
    ouro_multi_hop    questions of three hops over learned facts, by the number of trained questions

Stages of `ouro_mano` are KxL_lN: K layers, L visits, expressions of up to N operations. Those of
`ouro_multi_hop` are KxL_N, with N thousand questions. The paper gives its Mano results for the best
of three seeds and of four rates, here `--learning-rate` at the second largest; for the questions it
has curves, no numbers: more loops need fewer questions.

Not published, hence ours: heads (16 in both), feed-forward width (2,816) and Ouro's layers for the
"standard transformer"; training on the answer alone; the decay for the questions (0.1).

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendices B.2 and B.3.
"""

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.layered_qa import LayeredQA
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.task import Task
from titan_loop.models.families.ouro import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.optimizer import AdamWConfig
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

WINDOW = 1024
WARMUP_STEPS = 1_000

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

HOPS_GRID = ((6, 1), (6, 2), (6, 4), (24, 1))
HOPS_THOUSANDS = tuple(range(20, 220, 20))
HOPS_STEPS = 20_000


def grid_name(layers: int, loops: int) -> str:
    """Return the label of a row of a grid."""
    return f"{layers}⊗{loops}"


TABLES = {
    "ouro_mano": [
        ResultTable(
            name="accuracy",
            title="% right at the largest length",
            rows={
                grid_name(k, loops): {"stage": f"{k}x{loops}", "reading": f"static:{loops}"}
                for k, loops in MANO_GRID
            },
            columns={f"L = {length}": {"stage": f"l{length}"} for length in MANO_STEPS},
            everywhere={"task": "mano", "metric": "acc,none"},
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
            rows={
                grid_name(k, loops): {"stage": f"{k}x{loops}", "reading": f"static:{loops}"}
                for k, loops in HOPS_GRID
            },
            columns={f"{count}K": {"stage": f"{count}"} for count in HOPS_THOUSANDS},
            everywhere={"task": "layered_qa/held_out_3_hops", "metric": "acc,none"},
            columns_are="different questions trained on",
        )
    ],
}


def ouro_mano() -> Recipe:
    """Arithmetic on prefix expressions, as published: k layers visited l times, three lengths."""
    return Recipe(
        name="ouro_mano",
        stages=[
            Stage(
                name=f"{layers}x{loops}_l{length}",
                config=_published(
                    Mano(max_operations=length), layers, loops, rate=2e-4, batch=128, steps=steps
                ),
            )
            for length, steps in MANO_STEPS.items()
            for layers, loops in MANO_GRID
        ],
    )


def ouro_multi_hop() -> Recipe:
    """Three hops over learned facts, as published: 1, 2, 4 loops and 20K to 200K questions."""
    return Recipe(
        name="ouro_multi_hop",
        stages=[
            Stage(
                name=f"{layers}x{loops}_{count}",
                config=_published(
                    LayeredQA(trained_questions=1_000 * count),
                    layers,
                    loops,
                    rate=5e-4,
                    batch=2_048,
                    steps=HOPS_STEPS,
                ),
            )
            for count in HOPS_THOUSANDS
            for layers, loops in HOPS_GRID
        ],
    )


def _published(
    task: Task, layers: int, loops: int, *, rate: float, batch: int, steps: int
) -> LoopTrainer.Config:
    """Return a run of `steps` batches of `batch` windows, at width 1,024."""
    tokens = batch * WINDOW
    config = LoopTrainer.Config(
        total_tokens=steps * tokens,
        model=OuroOptions(size="374m", n_layers=layers, recurrent_steps=loops, exit_gate=False),
        dataloader=TaskLoader.Config(task=task),
        learning_rate=Schedule.warmup_cosine(
            rate,
            warmup_tokens=WARMUP_STEPS * tokens,
            total_tokens=steps * tokens,
            final=0.1 * rate,
        ),
        recurrence=RecurrenceConfig(steps=Schedule.constant(loops)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(tokens)),
        adamw=AdamWConfig(weight_decay=0.1, beta2=0.98, eps=1e-6),
        suite=SuiteConfig(interval=5_000, tasks=[task.name], depths=[loops], questions=3_000),
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 8
    config.training.max_norm = 1.0
    config.checkpoint.interval = 5_000
    return config
