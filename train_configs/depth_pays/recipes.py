"""A search for a recipe that makes looping pay: one model, several ways, the same text.

All arms are one layer of the quick start's shape and read the same windows of its corpus, so they
differ in R over training and in one option each; `grown_outside`, `two_layers` and `dense` have
more layers. An arm that is grown runs R = 1, then 2, then 4; one that is drawn runs an R from
Poisson(4), at most 8, in every training step, and a `late` one has other R by turns over the last
fifth of its tokens. All but those named `looped` minimise the loss of the last step alone. Arms
whose names end in `_flops` get the training FLOPs of `last_step` instead of its tokens.
`grown_averaged` is read from the average of its weights.
`depth_pays_rates` has the same layer at R = 1, 2, 4 and 8 with six learning rates, with and
without the residual scale, on a third of the tokens.
`depth_pays_tuned` has the arms that the front page compares, each at five rates with Muon; seeds
draw the weights and the order of the data. `every_step` has the gate, and so every step's loss;
`same_text` reads the tokens of the others 2.9 times,
`more_text` and `two_layers_more` read new ones: all three cost the FLOPs of `looped`.

    titan-loop train depth_pays --stage grown --debug.seed 1
    bash tools/depth_pays.sh            all arms and seeds, and their tables
    bash tools/depth_pays.sh --rates    the same for depth_pays_rates
    bash tools/depth_pays.sh --tuned    the same for depth_pays_tuned

"""

from collections.abc import Mapping
from typing import Any

from titan_loop.analysis.results import ResultTable, Where
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import SOURCES, at, bits_table, by_source, cosine, recipe_of, run, text

TOTAL_TOKENS = 3_000_000
TOTAL_FLOPS = 1.327e13
"""What TOTAL_TOKENS cost at R = 4 with the loss of the last step."""

BATCH_TOKENS = 4 * 256
STEPS = 4
GROWTH = Schedule.steps([(0, 1), (TOTAL_TOKENS // 4, 2), (TOTAL_TOKENS // 2, STEPS)])
"""R by tokens: a quarter of them at R = 1, another at 2, half at 4."""

EARLY_GROWTH = Schedule.steps([(0, 1), (TOTAL_TOKENS // 16, 2), (TOTAL_TOKENS // 8, STEPS)])
"""R by tokens: a sixteenth of them at R = 1, another at 2, the rest at 4."""

LATE_FROM, LATE_TURN = TOTAL_TOKENS * 4 // 5, 16 * BATCH_TOKENS
"""Tokens before R changes by turns, and tokens of a turn."""

OUTSIDE = {"prelude_layers": 1, "coda_layers": 1}
ARMS: dict[str, dict[str, Any]] = {
    "not_looped": {"steps": 1},
    "looped": {"steps": STEPS, "exit_gate": True},
    "last_step": {"steps": STEPS},
    "last_step_diagonal": {"steps": STEPS, "injection": "diagonal"},
    "last_step_scaled": {"steps": STEPS, "residual_scale": "visits"},
    "last_step_muon": {"steps": STEPS, "optimizer": "muon"},
    "drawn_muon": {"drawn_from": 1, "optimizer": "muon"},
    "drawn_from_3_muon": {"drawn_from": 3, "optimizer": "muon"},
    "drawn_diagonal_muon": {"drawn_from": 1, "injection": "diagonal", "optimizer": "muon"},
    "late_5_6_muon": {"late": (STEPS, 5, 6), "optimizer": "muon"},
    "late_8_muon": {"late": (STEPS, 2 * STEPS), "optimizer": "muon"},
    "grown": {},
    "grown_early": {"growth": EARLY_GROWTH},
    "grown_additive": {"injection": "additive"},
    "grown_diagonal": {"injection": "diagonal"},
    "grown_outside": {"n_layers": 3, **OUTSIDE},
    "grown_outside_injected": {"n_layers": 3, **OUTSIDE, "injection": "diagonal"},
    "grown_scaled": {"residual_scale": "visits"},
    "grown_averaged": {"average": 0.995},
    "grown_muon": {"optimizer": "muon"},
    "not_looped_muon": {"steps": 1, "optimizer": "muon"},
    "looped_muon": {"steps": STEPS, "exit_gate": True, "optimizer": "muon"},
    "two_layers": {"steps": 1, "n_layers": 2},
    "two_layers_muon": {"steps": 1, "n_layers": 2, "optimizer": "muon"},
    "dense": {"steps": 1, "n_layers": STEPS},
    "dense_muon": {"steps": 1, "n_layers": STEPS, "optimizer": "muon"},
    "not_looped_flops": {"steps": 1, "same_flops": True},
    "grown_flops": {"same_flops": True},
    "not_looped_muon_flops": {"steps": 1, "optimizer": "muon", "same_flops": True},
    "grown_muon_flops": {"optimizer": "muon", "same_flops": True},
    "looped_flops": {"steps": STEPS, "exit_gate": True, "same_flops": True},
}
"""Name → options; `dense` has as many layers as the looped arms have visits."""

RATE_TOKENS = TOTAL_TOKENS // 3
RATES = {
    "5e-3": 5e-3,
    "7e-3": 7e-3,
    "1e-2": 1e-2,
    "14e-3": 1.4e-2,
    "2e-2": 2e-2,
    "28e-3": 2.8e-2,
}
"""Name → largest learning rate; neighbours are √2 apart."""


MUON = {
    "not_looped_muon": "R = 1",
    "last_step_muon": "R = 4",
    "not_looped_muon_flops": "R = 1, more text",
    "two_layers_muon": "two layers",
    "dense_muon": "four layers",
    "looped_muon": "R = 4, every step readable",
    "grown_muon": "R from 1 to 4",
    "grown_muon_flops": "R from 1 to 4, more text",
    "late_8_muon": "R = 4, then 4 and 8 by turns",
    "late_5_6_muon": "R = 4, then 4, 5 and 6 by turns",
    "drawn_muon": "R drawn from 1 on",
    "drawn_from_3_muon": "R drawn from 3 on",
    "drawn_diagonal_muon": "R drawn from 1 on, injection",
}
"""Arm with Muon → its row."""


def _rows(arms: Mapping[str, str]) -> dict[str, Where]:
    return {
        row: {
            "stage": name,
            "reading": f"static:{ARMS[name].get('steps', STEPS)}"
            + ",ema" * ("average" in ARMS[name]),
        }
        for name, row in arms.items()
    }


def _bits(
    name: str, title: str, *, rows: Mapping[str, Where], less: str, message: str = ""
) -> ResultTable:
    columns = by_source((*SOURCES, "all"))
    return bits_table(name, title, rows, columns, less=less, against_flops="all", message=message)


TUNED: dict[str, dict[str, Any]] = {
    "not_looped": {"steps": 1},
    "looped": {"steps": STEPS},
    "every_step": {"steps": STEPS, "exit_gate": True},
    "two_layers": {"steps": 1, "n_layers": 2},
    "four_layers": {"steps": 1, "n_layers": STEPS},
    "same_text": {"steps": 1, "same_flops": True, "unique_tokens": TOTAL_TOKENS},
    "more_text": {"steps": 1, "same_flops": True},
    "two_layers_more": {"steps": 1, "n_layers": 2, "same_flops": True},
}
"""Arms of `depth_pays_tuned`."""

TUNED_RATES = {"25e-4": 2.5e-3, "5e-3": 5e-3, "1e-2": 1e-2, "2e-2": 2e-2, "4e-2": 4e-2}
"""Name → largest learning rate of Muon; neighbours are a factor of 2 apart."""

BEST = {
    "not_looped": "2e-2",
    "looped": "2e-2",
    "two_layers": "1e-2",
    "four_layers": "5e-3",
    "same_text": "1e-2",
    "more_text": "1e-2",
    "two_layers_more": "1e-2",
}
"""Arm of TUNED → the rate with its lowest mean over seeds 1 and 2, which has five seeds.

Four layers have five seeds at 1e-2, too: the first seeds, on an H200, had left the two level.
"""

SCALES: dict[str, dict[str, Any]] = {"": {}, "_scaled": {"residual_scale": "visits"}}
TABLES = {
    "depth_pays_rates": [
        bits_table(
            "bits_per_byte",
            "held-out bits per byte at the trained R",
            {
                f"R = {steps}{', residual scale' * bool(scale)}": at(f"r{steps}{scale}", steps)
                for scale in SCALES
                for steps in (1, 2, 4, 8)
            },
            {str(rate): {"stage": name} for name, rate in RATES.items()},
            source="all",
            columns_are="largest learning rate",
        )
    ],
    "depth_pays_tuned": [
        _bits(
            "best",
            "held-out bits per byte, Muon, best rates",
            rows={
                row: at(f"{name}_{BEST[name]}", TUNED[name]["steps"])
                for name, row in {
                    "not_looped": "R = 1",
                    "same_text": "R = 1, same text again",
                    "more_text": "R = 1, more text",
                    "looped": "R = 4",
                    "two_layers": "two layers",
                    "two_layers_more": "two layers, more text",
                    "four_layers": "four layers",
                }.items()
            },
            less="R = 1",
            message="For equal FLOPs one layer visited four times reads {R = 4|all} bits per byte, "
            "visited once on 2.9 times the text {R = 1, more text|all}, four layers "
            "(twice the parameters) {four layers|all}",
        ),
        bits_table(
            "rates",
            "held-out bits per byte at the trained R",
            {name: at(name, arm["steps"]) for name, arm in TUNED.items()},
            {str(rate): {"stage": name} for name, rate in TUNED_RATES.items()},
            source="all",
            columns_are="largest learning rate",
            message="R = 4 reads {looped|0.02} bits per byte at 0.02 and {looped|0.01} at "
            "0.01, R = 1 on more text {more_text|0.01} at best",
        ),
    ],
    "depth_pays": [
        _bits(
            "bits_per_byte",
            "held-out bits per byte at the trained R",
            rows=_rows({name: name for name in ARMS}),
            less="not_looped",
        ),
        _bits(
            "muon",
            "held-out bits per byte, trained with Muon",
            rows=_rows(MUON),
            less="R = 1",
            message="One layer reads {R = 1|all} at R = 1 and {R = 4|all} at R = 4; for the FLOPs "
            "of R = 4 more text at R = 1 reads {R = 1, more text|all}, four layers "
            "{four layers|all}",
        ),
        _bits(  # the gap of Ouro's Table 18 at R = 4: layers of their own less looped ones
            "layers",
            "held-out bits per byte, trained with Muon",
            rows=_rows({name: MUON[name] for name in ("last_step_muon", "dense_muon")}),
            less="R = 4",
            message="Four layers read {four layers|all} bits per byte, one layer four times "
            "{R = 4|all}",
        ),
    ],
}


def depth_pays() -> Recipe:
    """Why loop: one model trained without loops, with them, grown, and with each option alone."""
    return recipe_of("depth_pays", {name: _arm(**options) for name, options in ARMS.items()})


def depth_pays_rates() -> Recipe:
    """Best learning rate at R = 1, 2, 4 and 8, with and without the residual scale."""
    return recipe_of(
        "depth_pays_rates",
        {
            f"r{steps}{scale}_{name}": _arm(steps=steps, rate=rate, tokens=RATE_TOKENS, **options)
            for scale, options in SCALES.items()
            for steps in (1, 2, 4, 8)
            for name, rate in RATES.items()
        },
    )


def depth_pays_tuned() -> Recipe:
    """Loops, layers and more text, every arm at its own best learning rate."""
    return recipe_of(
        "depth_pays_tuned",
        {
            f"{arm}_{name}": _arm(rate=rate, optimizer="muon", **options)
            for arm, options in TUNED.items()
            for name, rate in TUNED_RATES.items()
        },
    )


def _arm(
    *,
    steps: int | None = None,
    n_layers: int = 1,
    exit_gate: bool = False,
    optimizer: str = "adamw",
    average: float = 0.0,
    rate: float = 1e-2,
    growth: Schedule = GROWTH,
    drawn_from: int | None = None,
    late: tuple[int, ...] = (),
    tokens: int = TOTAL_TOKENS,
    same_flops: bool = False,
    unique_tokens: int | None = None,
    **model: Any,
) -> LoopTrainer.Config:
    """Return an arm; without `steps` R grows, is drawn, or is STEPS and then takes turns."""
    most = STEPS if steps is None else steps
    if drawn_from is not None:
        recurrence = RecurrenceConfig(
            steps=Schedule.constant(STEPS),
            poisson=True,
            min_steps=drawn_from,
            max_steps=2 * STEPS,
        )
    elif late:
        turns = enumerate(range(LATE_FROM, tokens, LATE_TURN))
        later = [(start, late[turn % len(late)]) for turn, start in turns]
        recurrence = RecurrenceConfig(steps=Schedule.steps([(0, STEPS), *later]))
    else:
        recurrence = RecurrenceConfig(steps=growth if steps is None else Schedule.constant(steps))
    config = run(
        OuroOptions(
            size="quickstart",
            n_layers=n_layers,
            dim=96,
            hidden_dim=256,
            recurrent_steps=most,
            exit_gate=exit_gate,
            **model,
        ),
        text(unique_tokens=unique_tokens),
        tokens=tokens,
        window=256,
        windows=4,
        rate=cosine(rate, tokens, start=rate / 10),
        steps=recurrence,
        entropy_weight=Schedule.constant(0.1),
        held_out=HeldOutConfig(interval=0, depths=sorted({1, 2, most, 2 * most})),
        save_every=10_000,
        log_every=20,
        optimizer=optimizer,
    )
    config.ema.decay = average
    config.total_flops = TOTAL_FLOPS if same_flops else None
    return config
