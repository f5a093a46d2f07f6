"""A scaling law on two cores: a layer of four widths at R = 1, 2, 4, 8, on the quick start's text.

Every stage is one looped layer of the quick start's shape, trained to the loss of its last step at
a constant rate, so that a point early in a run is the end of a shorter run. The initial gain of the
layer's branches falls with its visits, without which R = 8 diverges at this rate.
`tools/scaling.sh` trains the stages with three seeds and fits the law to the training losses.

Source: the forms and hold-outs are from Chen et al. 2026, arXiv 2609.40316.
"""

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, bits_table, run, text

DIMS, STEPS = (48, 72, 96, 144), (1, 2, 4, 8)

TABLES = {
    "scaling_small": [
        bits_table(
            "bits_per_byte",
            "held-out bits per byte of prose",
            {f"D = {dim}": {"stage": f"d{dim}"} for dim in DIMS},
            {f"R = {steps}": at(f"r{steps}", steps) for steps in STEPS},
            source="prose",
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
    return run(
        OuroOptions(
            size="quickstart",
            n_layers=1,
            dim=dim,
            hidden_dim=8 * dim // 3,
            recurrent_steps=steps,
            exit_gate=False,
            residual_scale="visits",
        ),
        text(),
        tokens=1_500_000,
        window=256,
        windows=4,
        rate=Schedule.warmup_constant(5e-3, warmup_tokens=75_000),
        steps=steps,
        held_out=HeldOutConfig(interval=10_000, depths=[steps], windows=64),
        save_every=10_000,
        log_every=1,
    )
