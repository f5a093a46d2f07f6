"""What loops add, in miniature: Ouro's section 6 and its studies, for one core.

    physics_small    every stage at most half an hour on one core
    physics_short    a minute of the generated tasks: shows that they run, not that they learn

| stages | what is compared |
|---|---|
| `mano_KxL` | arithmetic by K layers visited L times: 4 visits of one layer, one layer, 4 layers |
| `hops_rL_P` | questions of three hops after P % of the questions, two layers visited L times |

LOG.md has what they show.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B, scaled down.
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
from train_configs.physics import grid_name

WINDOW = 64
BATCH_TOKENS = 16 * WINDOW

MANO = Mano(modulus=5, max_operations=3)
MANO_GRID = ((1, 1), (1, 4), (4, 1))
MANO_TOKENS = 12_000_000
MANO_RATE = 4e-3

HOPS_LOOPS = (1, 2, 4)
HOPS_SHARES = (10, 25, 50, 100)
HOPS_QUESTIONS = 9_216
"""Number of questions behind 100 %; 1,024 of the 10,240 are left for the exam."""
HOPS_TOKENS = 8_000_000
HOPS_RATE = 3e-3


def physics_small() -> Recipe:
    """Ouro's section 6 for one core: arithmetic and hops, by loops."""
    return Recipe(name="physics_small", stages=[*_mano(), *_hops()])


def _mano() -> list[Stage]:
    return [
        Stage(
            name=f"mano_{layers}x{loops}",
            config=_run(MANO, layers, loops, rate=MANO_RATE, tokens=MANO_TOKENS),
        )
        for layers, loops in MANO_GRID
    ]


def _hops() -> list[Stage]:
    stages = []
    for loops in HOPS_LOOPS:
        for share in HOPS_SHARES:
            task = LayeredQA(
                people=20, relations=8, trained_questions=HOPS_QUESTIONS * share // 100
            )
            config = _run(task, 2, loops, rate=HOPS_RATE, tokens=HOPS_TOKENS)
            stages.append(Stage(name=f"hops_r{loops}_{share}", config=config))
    return stages


def _run(task: Task, layers: int, loops: int, *, rate: float, tokens: int) -> LoopTrainer.Config:
    """Return a run that minimises the loss of the last step, at width 64."""
    config = LoopTrainer.Config(
        total_tokens=tokens,
        model=OuroOptions(
            size="debugmodel", n_layers=layers, recurrent_steps=loops, exit_gate=False
        ),
        dataloader=TaskLoader.Config(task=task),
        learning_rate=Schedule.warmup_cosine(
            rate, warmup_tokens=200_000, total_tokens=tokens, final=0.1 * rate
        ),
        recurrence=RecurrenceConfig(steps=Schedule.constant(loops)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
        adamw=AdamWConfig(beta2=0.98, eps=1e-6),
        suite=SuiteConfig(interval=1_000, tasks=[task.name], depths=[loops], questions=1_000),
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = 16
    config.checkpoint.interval = 4_000
    config.metrics.log_freq = 100
    return config
