"""One learning rate for all R and widths: `model.branch_scale` and `model.base_width`, on trial.

    rates      R = 1, 2, 4, 8 at D = 128; D = 64, 128, 256 at R = 2; with and without the rules
    boundary   R = 4, with a norm after every step to which the prelude's output is added, and
               without, at four rates, on three times the tokens and equal FLOPs

Every model is a prelude, two looped layers and a coda of Llama's blocks, on 0.5M tokens of the
quick start's text. Rates are apart by √2. `bash tools/rates.sh` runs the arms of `rates`, with
`--boundary` the arms of `boundary`, and prints their tables.

Sources: arXiv 2606.18524 (λ / (R·√L), λ = 1); Yang et al. 2022, arXiv 2203.03466 (µP).
"""

import math
from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.models.dense import DenseOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, bits_table, cosine, run, text

TOKENS = 500_000
HEAD, BASE, STEPS = 32, 128, 2
DEPTHS, WIDTHS = (1, 2, 4, 8), (64, 128, 256)
SHAPES = {
    **{f"r{steps}": (steps, BASE) for steps in DEPTHS},
    **{f"d{width}": (STEPS, width) for width in WIDTHS if width != BASE},
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ruled": {"branch_scale": 1.0, "base_width": BASE},
}
RATES = {
    f"{rate:.1e}".replace("e-0", "e-"): rate
    for rate in (4e-3 * math.sqrt(2) ** place for place in range(-2, 5))
}


def _table(rule: str) -> ResultTable:
    rows = {f"R = {steps}, D = {width}": shape for shape, (steps, width) in SHAPES.items()}
    how = f"AdamW, {'with' if rule == 'ruled' else 'without'} the rules"
    ends = [row for row, shape in rows.items() if shape in ("r1", "r8")]
    ends_at = "; ".join(
        f"at {rate} " + ", ".join(f"{row}: {{{row}|{rate}}}" for row in ends)
        for rate in ("2.8e-3", "4.0e-3")
    )
    return bits_table(
        rule,
        f"bits per byte, {how}",
        {row: at(f"{rule}_{shape}", SHAPES[shape][0]) for row, shape in rows.items()},
        {rate: {"stage": rate} for rate in RATES},
        source="all",
        columns_are="largest learning rate",
        message=f"Held-out bits per byte, {how}: {ends_at}",
    )


BOUNDARY_TOKENS, BOUNDARY_STEPS = 3 * TOKENS, 4
BOUNDARIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "boundary": {"norm_placement": "every_step", "injection": "additive"},
}
BOUNDARY_RATES = {label: rate for label, rate in RATES.items() if 2.7e-3 < rate < 9e-3}

TABLES = {
    "rates": [_table(rule) for rule in RULES],
    "boundary": [
        bits_table(
            "bits_per_byte",
            "held-out bits per byte at R = 4, by learning rate",
            {name: at(name, BOUNDARY_STEPS) for name in BOUNDARIES},
            {label: {"stage": label} for label in BOUNDARY_RATES},
            source="all",
            columns_are="largest learning rate",
            less="plain",
            message="Bits per byte of the boundary operator and of the plain loop: "
            + "; ".join(
                f"at {rate} {{boundary|{rate}}} and {{plain|{rate}}}" for rate in BOUNDARY_RATES
            ),
        )
    ],
}


def rates() -> Recipe:
    """Learning rates over R and width with AdamW, with the rules and without."""
    return Recipe(
        name="rates",
        stages=[
            Stage(name=f"{rule}_{shape}_{label}", config=_arm(steps, width, rate, options))
            for rule, options in RULES.items()
            for shape, (steps, width) in SHAPES.items()
            for label, rate in RATES.items()
        ],
    )


def boundary() -> Recipe:
    """A norm and the prelude's output between the steps of a loop, and neither."""
    return Recipe(
        name="boundary",
        stages=[
            Stage(
                name=f"{name}_{label}",
                config=_arm(BOUNDARY_STEPS, BASE, rate, options, tokens=BOUNDARY_TOKENS),
            )
            for name, options in BOUNDARIES.items()
            for label, rate in BOUNDARY_RATES.items()
        ],
    )


def _arm(
    steps: int,
    width: int,
    rate: float,
    options: dict[str, Any],
    *,
    tokens: int = TOKENS,
) -> LoopTrainer.Config:
    return run(
        DenseOptions(
            size="quickstart",
            dim=width,
            n_heads=width // HEAD,
            n_kv_heads=width // HEAD,
            hidden_dim=3 * width,
            prelude_layers=1,
            coda_layers=1,
            recurrent_steps=steps,
            **options,
        ),
        text(),
        tokens=tokens,
        window=256,
        windows=4,
        rate=cosine(rate, tokens, warmup=tokens // 10),
        steps=steps,
        held_out=HeldOutConfig(interval=0, depths=[steps]),
        save_every=1_000,
        log_every=50,
    )
