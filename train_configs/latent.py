"""Recursive latent-space reasoning on graphs of modular arithmetic, and its baselines.

Every stage is one method of the paper; `latent` has its sizes, `latent_small` one for two cores.
LOG.md has what the small one shows.

Source: "Unlocking Out-of-Distribution Generalization in Transformers via Recursive Latent Space
Reasoning" (003); batches, rates and graphs as in the authors' code.
"""

from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.dag_arithmetic import DagArithmetic
from titan_loop.models.families.latent import LatentOptions
from titan_loop.objectives.latent_supervision import LatentSupervision
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.optimizer import AdamWConfig
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

SMALL = DagArithmetic(
    modulus=7,
    nodes=16,
    leaves=4,
    names=64,
    most_depth=6,
    test_nodes=(8, 16, 24, 32, 48, 64),
)
SMALL_WINDOW = 112
SMALL_TOKENS = 10_000_000
SMALL_BATCH = 8 * SMALL_WINDOW


def latent_small() -> Recipe:
    """Arithmetic on graphs of 16 nodes, solved with up to 64: all methods of the paper."""
    return Recipe(
        name="latent_small",
        stages=[
            Stage(name="discrete", config=_small()),
            Stage(name="correction", config=_small(corruption=0.05)),
            Stage(name="continuous", config=_small(state="continuous")),
        ],
    )


def _small(**model) -> LoopTrainer.Config:
    config = LoopTrainer.Config(
        total_tokens=SMALL_TOKENS,
        model=LatentOptions(size="small", relative_window=16, **model),
        dataloader=TaskLoader.Config(task=SMALL, all_targets=True),
        loss=LatentSupervision.Config(),
        learning_rate=Schedule.warmup_cosine(
            2e-3, start=2e-4, warmup_tokens=200_000, total_tokens=SMALL_TOKENS, final=1e-4
        ),
        recurrence=RecurrenceConfig(steps=Schedule.constant(6), from_data=True, max_steps=6),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(SMALL_BATCH)),
        adamw=AdamWConfig(beta2=0.98, weight_decay=0.01),
    )
    config.training.seq_len = SMALL_WINDOW
    config.training.local_batch_size = 8
    config.checkpoint.interval = 1000
    config.metrics.log_freq = 100
    return config
