"""A scaling law on two cores: a layer of four widths at R = 1, 2, 4, 8, on the quick start's text.

Every stage is one looped layer of the quick start's shape, trained to the loss of its last step at
a constant rate, so that a point early in a run is the end of a shorter run. The initial gain of the
layer's branches falls with its visits, without which R = 8 diverges at this rate.
`tools/scaling.sh` trains the stages with three seeds and fits the law to the training losses;

Source: the forms and hold-outs are from Chen et al. 2026, arXiv 2609.40316.
"""

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..quickstart.recipes import CORPUS

DIMS, STEPS = (48, 72, 96, 144), (1, 2, 4, 8)
TOKENS, WINDOW, BATCH = 1_500_000, 256, 1_024

TABLES = {
    "scaling_small": [
        ResultTable(
            name="bits_per_byte",
            title="held-out bits per byte of prose",
            rows={f"D = {dim}": {"stage": f"d{dim}"} for dim in DIMS},
            columns={
                f"R = {steps}": {"stage": f"r{steps}", "reading": f"static:{steps}"}
                for steps in STEPS
            },
            everywhere={"task": f"{HELD_OUT}/prose", "metric": "bits_per_byte"},
            factor=1.0,
            digits=3,
        )
    ]
}


def scaling_small() -> Recipe:
    """A layer of four widths at R = 1, 2, 4 and 8, for a scaling law."""
    return Recipe(
        name="scaling_small",
        stages=[
            Stage(name=f"d{dim}_r{steps}", config=_arm(dim, steps))
            for dim in DIMS
            for steps in STEPS
        ],
    )


def _arm(dim: int, steps: int) -> LoopTrainer.Config:
    config = LoopTrainer.Config(
        total_tokens=TOKENS,
        model=OuroOptions(
            size="quickstart",
            n_layers=1,
            dim=dim,
            hidden_dim=8 * dim // 3,
            recurrent_steps=steps,
            exit_gate=False,
            residual_scale="visits",
        ),
        dataloader=WindowLoader.Config(
            mixture=[f"{CORPUS}/code=0.4", f"{CORPUS}/prose=0.4", f"{CORPUS}/math=0.2"]
        ),
        learning_rate=Schedule.warmup_constant(5e-3, warmup_tokens=75_000),
        recurrence=RecurrenceConfig(steps=Schedule.constant(steps)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH)),
        held_out=HeldOutConfig(interval=10_000, depths=[steps], windows=64),
    )
    config.training.seq_len = WINDOW
    config.training.local_batch_size = BATCH // WINDOW
    config.checkpoint.interval = 10_000
    config.metrics.log_freq = 1
    return config
