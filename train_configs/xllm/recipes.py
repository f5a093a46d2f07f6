"""xLLM-Loop's dense models as published, and in miniature.

    xllm_s       Part II, 0.30B: fixed, drawn and learned depths, and each injection
    xllm_730m    Part I, 730M: plain, Ouro-like, middle loop, Huginn, high and low states
    xllm_small   the same questions at D = 128, on the quick start's text and on arithmetic

`xllm_s` and `xllm_730m` read `corpora/xllm/text`, which you prepare with a tokenizer of at most
64,256 and 250,624 tokens. Published: sizes, batch of 512 windows of 8,192 tokens, AdamW, rates,
schedules, tokens. Not published, hence ours: the mixture (part of its 42 sources is not public),
and how the work is spread. Part I stops early on one schedule of 119,210 steps: end a stage with
`--training.steps 80000` for its 336B tokens.

The small arms have the text and tokens of one another; at their mean depth of five recurrences they
also have equal expected FLOPs, but for `d4`, which visits every layer once.

Source: Huang et al. 2026 (xLLM-Loop, "Towards Looped Models Done Right" I and II), arXiv
2610.06833, and `xllm/paper_part1/recipes.py`, `xllm/paper_part2/recipes.py` of their code.
Deviation: a depth is drawn for every training step, not for every micro-batch of it, whose number
depends on the layout.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.xllm.depth import DrawnDepth, capped_depths
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.families.xllm.prior import LearnedDepth, PriorSettings
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import ModelOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.schedule import Knot, Schedule
from titan_loop.training.trainer import LoopTrainer

from ..physics.small import physics_small
from ..runs import at, bits_table, by_source, by_steps, cosine, recipe_of, run, text

CORPUS = "corpora/xllm/text"
WINDOW, BATCH = 8_192, 512 * 8_192
MEAN, SIGMA, MOST, BACKWARD = 5, 0.5, 64, 10
PARCAE_STEP = 0.5 * math.log(5)

SHARED: dict[str, Any] = {"rope_theta": 1e6}
OF_PART_ONE: dict[str, Any] = {
    "size": "730m",
    "prelude_layers": 8,
    "coda_layers": 8,
    "n_layers": 28,
    **SHARED,
}
_PLAIN: dict[str, Any] = {
    "dim": 1536,
    "n_heads": 24,
    "n_kv_heads": 6,
    "hidden_dim": 4352,
    "vocab_size": 250_624,
    "norm_eps": 1e-6,
    "residual_scale": "none",
    **SHARED,
}
_CYCLES: dict[str, Any] = {"recurrent_steps": 2, "low_cycles": 3}
PART_ONE: dict[str, ModelOptions] = {
    "dense_d28": DenseOptions(**_PLAIN, n_layers=28, recurrent_steps=1),
    "dense_d112": DenseOptions(**_PLAIN, n_layers=112, recurrent_steps=1),
    "dense_ouro": DenseOptions(**_PLAIN, n_layers=28, recurrent_steps=4),
    "dense_middle": DenseOptions(
        **_PLAIN, n_layers=28, recurrent_steps=8, prelude_layers=8, coda_layers=8
    ),
    "dense_ouro_raw_injection": XllmOptions(
        **{**OF_PART_ONE, "prelude_layers": 0, "coda_layers": 0},
        recurrent_steps=4,
        start_state="input",
    ),
    "dense_middle_prelude_injection": XllmOptions(**OF_PART_ONE, start_state="input"),
    "dense_huginn": XllmOptions(**OF_PART_ONE),
    "dense_shared_hl": XllmOptions(**OF_PART_ONE, **_CYCLES, states="shared"),
    "dense_split_hl": XllmOptions(**OF_PART_ONE, **_CYCLES, states="split"),
    "dense_split_hl_x2": XllmOptions(**OF_PART_ONE, **_CYCLES, states="split", core_passes=2),
}
"""Their names of the dense models of Part I; its mixtures of experts are not here."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of Part II's tables.

    Attributes:
        rate: Largest learning rate.
        depth: How R is chosen: fixed, drawn or learned.
        mean: Mean of a distribution before training.
        prior: Settings of a learned distribution.
        uniform_to: Largest R of a uniform distribution before training, in place of a Poisson-
            lognormal one of that mean.
    """

    options: ModelOptions
    rate: float
    depth: str = "drawn"
    mean: int = MEAN
    uniform_to: int = 0
    prior: PriorSettings = field(default_factory=PriorSettings)


def _s(**options: Any) -> XllmOptions:
    return XllmOptions(**{"size": "s", **SHARED, **options})


PART_TWO: dict[str, Row] = {
    "s_fixed_r5": Row(options=_s(), rate=1.5e-3, depth="fixed"),
    "s_fixed_pln5": Row(options=_s(), rate=1.5e-3),
    "s_learned_entropy0": Row(options=_s(), rate=2e-3, depth="learned"),
    "s_learned_entropy0p01": Row(
        options=_s(), rate=2e-3, depth="learned", prior=PriorSettings(entropy_weight=0.01)
    ),
    "s_huginn_linear": Row(options=_s(injection="linear", state_norm=True), rate=1e-3),
    "s_parcae": Row(options=_s(injection_step=PARCAE_STEP, prelude_norm=True), rate=1.5e-3),
    "s_orthoinj": Row(options=_s(injection="orthogonal", injection_step=PARCAE_STEP), rate=2e-3),
    "s_d4": Row(
        options=DenseOptions(**{**_PLAIN, "vocab_size": 64_256}, n_layers=4, recurrent_steps=1),
        rate=2e-3,
        depth="fixed",
    ),
}
"""Their names of the 0.30B models of Part II, on 5,120 updates each."""

SMALL_TOKENS, SMALL_BATCH = 1_500_000, 1_024
SMALL_RATE = 4e-3
PRIOR_RATE = 3e-3
"""Rate of a learned distribution: it has 1,465 updates here, 5,120 in the paper, at 1e-3 there."""


def _small(**options: Any) -> XllmOptions:
    return XllmOptions(**{"size": "small", **options})


SMALL: dict[str, Row] = {
    "fixed_r5": Row(options=_small(), rate=SMALL_RATE, depth="fixed"),
    "drawn": Row(options=_small(), rate=SMALL_RATE),
    "learned": Row(options=_small(), rate=SMALL_RATE, depth="learned"),
    "learned_entropy": Row(
        options=_small(), rate=SMALL_RATE, depth="learned", prior=PriorSettings(entropy_weight=0.01)
    ),
    "learned_free": Row(
        options=_small(), rate=SMALL_RATE, depth="learned", prior=PriorSettings(mean_weight=0.0)
    ),
    "linear": Row(options=_small(injection="linear", state_norm=True), rate=SMALL_RATE),
    "parcae": Row(options=_small(injection_step=PARCAE_STEP, prelude_norm=True), rate=SMALL_RATE),
    "orthogonal": Row(
        options=_small(injection="orthogonal", injection_step=PARCAE_STEP), rate=SMALL_RATE
    ),
    "middle": Row(options=_small(injection="none", start_state="input"), rate=SMALL_RATE),
    "d4": Row(
        options=_small(injection="none", start_state="input", recurrent_steps=1),
        rate=SMALL_RATE,
        depth="fixed",
    ),
}
"""Arms of `xllm_small` on text."""

THIN_PRIOR_RATE = 1e-2


def _thin() -> XllmOptions:
    return _small(n_layers=1, prelude_layers=0, coda_layers=0)


THIN: dict[str, Row] = {
    "thin_fixed_r5": Row(options=_thin(), rate=SMALL_RATE, depth="fixed"),
    "thin_drawn": Row(options=_thin(), rate=SMALL_RATE),
    "thin_learned": Row(options=_thin(), rate=SMALL_RATE, depth="learned"),
    "thin_free": Row(
        options=_thin(), rate=SMALL_RATE, depth="learned", prior=PriorSettings(mean_weight=0.0)
    ),
    "thin_free_from_2": Row(
        options=_thin(),
        rate=SMALL_RATE,
        depth="learned",
        mean=2,
        prior=PriorSettings(mean_weight=0.0),
    ),
    "thin_shallow": Row(
        options=_thin(), rate=SMALL_RATE, depth="learned", prior=PriorSettings(mean=3.0)
    ),
}
"""Arms of one layer, which needs its recurrences more: the learned distribution has a penalty on
the distance of its mean from 5, none (from a mean of 5 and of 2), or one from 3."""

MANO_DEPTHS = (1, 2, 3, MEAN, 8)
_DEPTH_HELPS: dict[str, Any] = {
    "options": _small(dim=64, hidden_dim=192, n_layers=1, prelude_layers=0, coda_layers=0),
    "rate": 1e-2,
}
_UNIFORM: dict[str, Any] = {**_DEPTH_HELPS, "depth": "learned", "uniform_to": 8}
MANO: dict[str, Row] = {
    "mano_fixed_r5": Row(**_DEPTH_HELPS, depth="fixed"),
    "mano_drawn": Row(**{**_UNIFORM, "depth": "drawn"}),
    "mano_free": Row(**_UNIFORM, prior=PriorSettings(mean_weight=0.0, entropy_weight=0.05)),
    "mano_free_plain": Row(**_UNIFORM, prior=PriorSettings(mean_weight=0.0)),
    "mano_shallow": Row(**_UNIFORM, prior=PriorSettings(mean=2.0, entropy_weight=0.05)),
}
"""Arms of one layer on arithmetic (`mano_1x4` of `physics_small`). The learned distribution starts
uniform over 1 … 8, so an entropy bonus alone would leave it there."""

TABLES = {
    "xllm_small": [
        bits_table(
            "bits_per_byte",
            "held-out bits per byte (R = 5; d4: 1)",
            {arm: at(arm, 1 if arm == "d4" else MEAN) for arm in SMALL},
            by_source(),
            less="fixed_r5",
        ),
        bits_table(
            "one_layer",
            "held-out bits per byte of prose, one layer",
            {arm: {"stage": arm} for arm in THIN},
            by_steps((1, 2, MEAN, 2 * MEAN), "{}"),
            source="prose",
            less="thin_fixed_r5",
            columns_are="recurrent steps",
        ),
        ResultTable(
            name="mano",
            title="arithmetic by one layer: % right, R =",
            rows={arm: {"stage": arm} for arm in MANO},
            columns=by_steps(MANO_DEPTHS, "{}"),
            everywhere={"task": "mano", "metric": "acc,none"},
            less="mano_fixed_r5",
            columns_are="recurrent steps",
        ),
        ResultTable(
            name="depth",
            title="mean of the learned distribution of R",
            rows={
                arm: {"stage": arm}
                for arm, row in {**SMALL, **THIN, **MANO}.items()
                if row.depth == "learned"
            },
            columns={moment: {"reading": moment} for moment in ("start", "quarter", "half", "end")},
            everywhere={"task": "learned_depths", "metric": "mean"},
            factor=1.0,
            digits=2,
            columns_are="training",
            message="The mean of R goes from {thin_shallow|start} to {thin_shallow|end} in "
            "thin_shallow, from {thin_free|start} to {thin_free|end} in thin_free",
        ),
    ]
}


def xllm_s() -> Recipe:
    """Part II at 0.30B: depths and injections of xLLM-Loop, 21.5B tokens each."""
    tokens = 5_120 * BATCH
    stages = []
    for name, row in PART_TWO.items():
        config = _published(row.options, tokens)
        warmup, decay = tokens // 20, tokens // 10
        config.learning_rate = Schedule(
            (
                Knot(0, row.rate * 1e-4, "linear"),
                Knot(warmup, row.rate),
                Knot(tokens - decay, row.rate, "cosine"),
                Knot(tokens, row.rate / 10),
            )
        )
        _set_depth(config, row)
        stages.append(Stage(name=name, config=config))
    return Recipe(name="xllm_s", stages=stages)


def xllm_730m() -> Recipe:
    """Part I at 730M: the dense models, with loops, injections and states of every kind."""
    tokens = 119_210 * BATCH
    stages = []
    for name, options in PART_ONE.items():
        config = _published(options, tokens)
        assert options.recurrent_steps is not None or isinstance(options, XllmOptions)
        config.recurrence.steps = Schedule.constant(options.recurrent_steps or 8)
        config.learning_rate = Schedule.warmup_cosine(
            6e-4, start=6e-8, warmup_tokens=200 * BATCH, total_tokens=tokens, final=6e-6
        )
        stages.append(Stage(name=name, config=config))
    return Recipe(name="xllm_730m", stages=stages)


def xllm_small() -> Recipe:
    """Depths and injections of xLLM-Loop in miniature, on one core."""
    configs = {
        name: _arm(row, THIN_PRIOR_RATE if name in THIN else PRIOR_RATE)
        for name, row in {**SMALL, **THIN}.items()
    }
    return recipe_of("xllm_small", configs | {name: _mano(row) for name, row in MANO.items()})


def _arm(row: Row, prior_rate: float) -> LoopTrainer.Config:
    config = run(
        row.options,
        text(),
        tokens=SMALL_TOKENS,
        window=256,
        windows=SMALL_BATCH // 256,
        rate=cosine(row.rate, SMALL_TOKENS),
        steps=MEAN,
        adamw=AdamWConfig(beta2=0.98),
        held_out=HeldOutConfig(depths=[1, 2, MEAN, 2 * MEAN], windows=128),
        save_every=2_000,
        log_every=50,
    )
    _set_depth(config, row, prior_rate=prior_rate)
    return config


def _mano(row: Row) -> LoopTrainer.Config:
    known = {stage.name: stage.config for stage in physics_small().stages}
    config = deepcopy(known["mano_1x4"])
    config.model = row.options
    config.suite.depths, config.suite.interval = [*MANO_DEPTHS], 4_000
    _set_depth(config, row, prior_rate=PRIOR_RATE)
    return config


def _set_depth(config: LoopTrainer.Config, row: Row, *, prior_rate: float = 1e-3) -> None:
    """Set how R of a training step is chosen, and how far back its gradient goes."""
    if row.depth == "fixed":
        steps = row.options.recurrent_steps or MEAN
        config.recurrence = RecurrenceConfig(steps=Schedule.constant(steps))
        return
    config.recurrence = RecurrenceConfig(
        steps=Schedule.constant(row.mean),
        poisson=True,
        lognormal_sigma=SIGMA,
        max_steps=MOST,
        backward_steps=BACKWARD,
    )
    # Depths far from a small mean underflow, and a learned distribution has to reach them.
    start = np.maximum(capped_depths(row.mean, SIGMA, MOST), 1e-30).tolist()
    if row.uniform_to:
        start = [1 / row.uniform_to] * row.uniform_to
    if row.depth == "drawn":
        config.callbacks = (DrawnDepth(probabilities=start),)
    else:
        config.callbacks = (LearnedDepth(start, settings=replace(row.prior, rate=prior_rate)),)


def _published(options: ModelOptions, tokens: int) -> LoopTrainer.Config:
    return run(
        options,
        WindowLoader.Config(mixture=[CORPUS]),
        tokens=tokens,
        window=WINDOW,
        windows=512,
        at_once=1,
        rate=Schedule.constant(0.0),  # a part sets its own
        steps=MEAN,
        adamw=AdamWConfig(weight_decay=0.1, beta2=0.98, eps=1e-8),
        save_every=1_000,
        max_norm=1.0,
    )
