"""Which recipe makes looping worth its compute: one model trained in several ways on the same text.

All arms have the same three layers (0.3 M parameters with embedding and head) and read the same
windows of the quick start's corpus, so they differ in R over training and in one option each. An
arm that is grown runs R = 1, then 2, then 4; all but `looped` minimise the loss of the last step.

    titan-loop train depth_pays --stage grown --debug.seed 1
    bash tools/depth_pays.sh            all arms and seeds, and their tables

LOG.md has the results.
"""

from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.models.families.ouro import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.optimizer import OptimizerName
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.quickstart import CORPUS

TOTAL_TOKENS = 1_500_000
WINDOW_TOKENS = 256
BATCH_TOKENS = 4 * WINDOW_TOKENS
STEPS = 4
GROWTH = Schedule.steps([(0, 1), (TOTAL_TOKENS // 4, 2), (TOTAL_TOKENS // 2, STEPS)])
"""R by tokens: a quarter of them at R = 1, another at 2, half at 4."""

ARMS = {
    "not_looped": {"steps": 1},
    "looped": {"steps": STEPS, "exit_gate": True},
    "last_step": {"steps": STEPS},
    "grown": {},
    "grown_additive": {"injection": "additive"},
    "grown_diagonal": {"injection": "diagonal"},
    "grown_outside": {"prelude_layers": 1, "coda_layers": 1},
    "grown_outside_injected": {
        "prelude_layers": 1,
        "coda_layers": 1,
        "injection": "diagonal",
    },
    "grown_scaled": {"residual_scale": "visits"},
    "grown_muon": {"optimizer": "muon"},
    "dense": {"steps": 1, "n_layers": 3 * STEPS},
}
"""Name → options; `dense` has as many layers as the looped arms have visits."""

TABLES = {
    "depth_pays": [
        ResultTable(
            name="bits_per_byte",
            title="held-out bits per byte at the trained R",
            rows={
                name: {"stage": name, "reading": f"static:{arm.get('steps', STEPS)}"}
                for name, arm in ARMS.items()
            },
            columns={
                source: {"task": f"{HELD_OUT}/{source}", "metric": "bits_per_byte"}
                for source in ("code", "prose", "math")
            },
            factor=1.0,
            digits=3,
        )
    ]
}


def depth_pays() -> Recipe:
    """Why loop: one model trained without loops, with them, grown, and with each option alone."""
    return Recipe(
        name="depth_pays",
        stages=[Stage(name=name, config=_arm(**options)) for name, options in ARMS.items()],
    )


def _arm(
    *,
    steps: int | None = None,
    n_layers: int = 3,
    exit_gate: bool = False,
    optimizer: OptimizerName = "adamw",
    **model: Any,
) -> LoopTrainer.Config:
    """Return an arm; without `steps` R grows."""
    most = STEPS if steps is None else steps
    config = LoopTrainer.Config(
        total_tokens=TOTAL_TOKENS,
        model=OuroOptions(
            size="quickstart",
            n_layers=n_layers,
            dim=64,
            hidden_dim=192,
            recurrent_steps=most,
            exit_gate=exit_gate,
            **model,
        ),
        dataloader=WindowLoader.Config(
            mixture=[f"{CORPUS}/code=0.4", f"{CORPUS}/prose=0.4", f"{CORPUS}/math=0.2"]
        ),
        learning_rate=Schedule.warmup_cosine(
            1e-2, start=1e-3, warmup_tokens=100_000, total_tokens=TOTAL_TOKENS, final=1e-3
        ),
        entropy_weight=Schedule.constant(0.1),
        recurrence=RecurrenceConfig(steps=GROWTH if steps is None else Schedule.constant(steps)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
        held_out=HeldOutConfig(interval=0, depths=sorted({1, 2, most, 2 * most})),
    )
    config.optimizer.name = optimizer
    config.training.seq_len = WINDOW_TOKENS
    config.training.local_batch_size = 4
    config.checkpoint.interval = 10_000
    config.metrics.log_freq = 20
    return config
