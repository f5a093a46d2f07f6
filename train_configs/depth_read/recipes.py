"""Depth that pays when it is read: early steps that can be read, at no cost to the last one.

Model, text and optimiser are as in `last_step_muon` of `depth_pays`.

| stages | comparison |
|---|---|
| the names in TEXT | ways to make steps 1 … 4 readable; the last step's loss; Stage I |
| `r1`, `r2`, `r3` | the same layer trained for that R alone |
| `ARM_2e-2` | the last step's loss and two late ways at its own best rate; seeds draw data, too |
| `ARM_gate`, `ARM_long` | Stage II after it, in 200 and in 1,000 updates |
| `mano_ARM`, `hops_ARM` | arithmetic and three hops of `physics_exams`, and their Stage II |

    titan-loop train depth_read --stage even_late --debug.seed 1
    bash tools/depth_read.sh            all stages and seeds, and their tables
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.families.ouro.objective import AdaptiveGateLoss
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..depth_pays.recipes import BATCH_TOKENS, LATE_FROM, STEPS, TOTAL_TOKENS, depth_pays
from ..physics.commuted_mano import CommutedMano
from ..physics.exams import REPORTED, physics_exams
from ..physics.layered_paths import LayeredPaths
from ..runs import bits_table, by_source, by_steps, cosine
from .readable_steps import ReadableStepsLoss
from .step_gains import StepGains

GATES = {"gate": 200, "long": 1000}
"""Name of a Stage II → number of updates."""


def _late(value: float, start: int = LATE_FROM) -> Schedule:
    return Schedule.steps([(0, 0), (start, value)])


HALF = TOTAL_TOKENS // 2
RAMP = Schedule.parse(f"0:0 constant {HALF}:0 linear {TOTAL_TOKENS}:0.5")
FALL = Schedule.parse(f"0:0.75 constant {HALF}:0.75 linear {TOTAL_TOKENS}:0.1")
EVEN: dict[str, Any] = {"weights": "even"}
RANK_32: dict[str, Any] = {**EVEN, "distillation": 1.0, "readout_rank": 32}
FIRST: dict[str, Any] = {**RANK_32, "weights": "first"}
RANK_64: dict[str, Any] = {**RANK_32, "readout_rank": 64}
TEXT: dict[str, dict[str, Any]] = {
    "last_step": {"every_step": Schedule.constant(0)},
    "stage_one": {},
    "late": {"every_step": _late(1.0)},
    "even_late": {**EVEN, "every_step": _late(0.5)},
    "even_tenth_late": {**EVEN, "every_step": _late(0.1)},
    "distilled_late": {**EVEN, "every_step": _late(0.5), "distillation": 1.0},
    "rank8_distilled_late": {
        **EVEN,
        "every_step": _late(0.5),
        "distillation": 1.0,
        "readout_rank": 8,
    },
    "rank32_distilled_half": {**RANK_32, "every_step": _late(0.5, HALF)},
    "rank64_distilled_half": {**RANK_64, "every_step": _late(0.5, HALF)},
    "rank32_distilled_ramp": {**RANK_32, "every_step": RAMP},
    "rank32_distilled": {**RANK_32, "every_step": Schedule.constant(0.5)},
    "rank64_distilled": {**RANK_64, "every_step": Schedule.constant(0.5)},
    "rank64_distilled_quarter": {**RANK_64, "every_step": Schedule.constant(0.25)},
    "rank64_distilled_fall": {**RANK_64, "every_step": FALL},
    "rank32_distilled_first": {**FIRST, "every_step": Schedule.constant(0.5)},
    "rank32_distilled_first_more": {**FIRST, "every_step": Schedule.constant(0.7)},
    "rank32_distilled_first_half": {**FIRST, "every_step": _late(0.5, HALF)},
    "rank32_distilled_first_quarter": {**FIRST, "every_step": _late(0.5, TOTAL_TOKENS // 4)},
    "rank32_distilled_first_third": {**FIRST, "every_step": Schedule.constant(0.3)},
    "rank32_half_distilled_first": {
        **FIRST,
        "distillation": 0.5,
        "every_step": Schedule.constant(0.5),
    },
    "norm_at_readout_late": {**EVEN, "every_step": _late(0.5), "norm_placement": "readout"},
}
"""Name → options of loss and model."""

AT_2E_2 = ("last_step", "late", "rank8_distilled_late")
"""Arms of TEXT at the best rate of the last step's loss, at which that drops late in training."""

ALONE = (1, 2, 3)
TASKS = {
    "mano": ("mano_1x4", f"{CommutedMano.name}/{REPORTED}"),
    "hops": ("hops_r4_50", f"{LayeredPaths.name}/held_out_3_hops"),
}
"""Name → stage of `physics_exams`, and the result of its exam."""

TASK_ARMS = ("rank32_distilled_first",)
MODEL_OPTIONS = ("readout_rank", "norm_placement")
DEPTHS = (*range(1, STEPS + 1), 2 * STEPS)
READABLE = "rank32_distilled_first_quarter"


def _changes() -> list[ResultTable]:
    """Return changes over the step before by kind of text and of question, and gaps to step 4."""
    steps: dict[str, Any] = {
        "columns": by_steps(DEPTHS[:-1], "step {}"),
        "columns_are": "step that is read",
    }
    text: dict[str, Any] = {**steps, "factor": 1.0, "digits": 3}
    return [
        StepGains(
            name="gains",
            title="change of held-out bits per byte over the step before",
            rows=by_source(),
            everywhere={"stage": READABLE, "metric": "bits_per_byte"},
            message="Over the step before, step 2 changes math by {math|step 2} and prose by "
            "{prose|step 2} bits per byte, step 4 by {math|step 4} and {prose|step 4}",
            **text,
        ),
        StepGains(
            name="gains_hops",
            title="change of % right over the step before",
            rows={
                "facts": {"stratum": "facts"},
                "three hops, trained": {"stratum": "trained_3_hops"},
                "three hops, held out": {"stratum": "held_out_3_hops"},
            },
            everywhere={
                "stage": "hops_rank32_distilled_first",
                "task": LayeredPaths.name,
                "metric": "acc,none",
            },
            message="Step 2 answers {facts|step 2} points more of the facts, {three hops, trained|"
            "step 2} more of trained and {three hops, held out|step 2} of held-out three hops",
            **steps,
        ),
        StepGains(
            name="gaps",
            title="held-out bits per byte above step 4",
            rows={
                words: {"stage": stage}
                for words, stage in (
                    ("last step alone", "last_step"),
                    ("Stage I", "stage_one"),
                    ("distilled early steps", READABLE),
                )
            },
            everywhere={"task": f"{HELD_OUT}/all", "metric": "bits_per_byte"},
            over="last",
            message="Step 1 stands {last step alone|step 1} bits per byte above step 4 after "
            "training for the last step, {Stage I|step 1} after Stage I (one seed), and {distilled "
            "early steps|step 1} with distilled early steps",
            **text,
        ),
    ]


TABLES = {
    "depth_read": [
        bits_table(
            "bits_per_byte",
            "held-out bits per byte of all sources",
            {name: {"stage": name} for name in (*TEXT, *(f"r{steps}" for steps in ALONE))},
            by_steps(DEPTHS),
            source="all",
            columns_are="step that is read",
            less="last_step",
        ),
        bits_table(
            "at_2e-2",
            "held-out bits per byte of all sources, learning rate 2e-2",
            {name: {"stage": f"{name}_2e-2"} for name in AT_2E_2},
            by_steps(DEPTHS),
            source="all",
            columns_are="step that is read",
            less="last_step",
        ),
        *(
            ResultTable(
                name=name,
                title=f"% of {name} right",
                rows={kind: {"stage": f"{name}_{kind}"} for kind in TASK_ARMS},
                columns=by_steps(DEPTHS[:-1]),
                everywhere={"task": result, "metric": "acc,none"},
                columns_are="step that is read",
            )
            for name, (_, result) in TASKS.items()
        ),
        *_changes(),
    ]
}


def depth_read() -> Recipe:
    """Early steps that can be read, and gates that leave by them: text, arithmetic and hops."""
    stages = _with_gates(TEXT, "last_step_muon")
    stages += [Stage(name=f"r{steps}", config=_alone(steps)) for steps in ALONE]
    for name in AT_2E_2:
        config = _arm("last_step_muon", TEXT[name])
        config.learning_rate = cosine(2e-2, config.total_tokens, start=2e-3)
        stages.append(Stage(name=f"{name}_2e-2", config=config))
    for task, (stage, _) in TASKS.items():
        stages += _with_gates({f"{task}_{name}": TEXT[name] for name in TASK_ARMS}, stage)
    return Recipe(name="depth_read", stages=stages)


@cache
def _known() -> Mapping[str, LoopTrainer.Config]:
    """Return the stages that arms change: stage of `depth_pays` or `physics_exams` → config."""
    recipes = depth_pays(), physics_exams()
    return {stage.name: stage.config for recipe in recipes for stage in recipe.stages}


def _with_gates(arms: Mapping[str, Mapping[str, Any]], known: str) -> list[Stage]:
    """Return every arm, and a Stage II of each kind that starts from it."""
    return [
        stage
        for name, options in arms.items()
        for stage in (
            Stage(name=name, config=_arm(known, options)),
            *(
                Stage(
                    name=f"{name}_{kind}", parent=name, config=_gate(_arm(known, options), updates)
                )
                for kind, updates in GATES.items()
            ),
        )
    ]


def _arm(known: str, options: Mapping[str, Any]) -> LoopTrainer.Config:
    """Return a known stage with a gate and this objective, whose schedules fit its tokens."""
    config = deepcopy(_known()[known])
    model = {name: options[name] for name in MODEL_OPTIONS if name in options}
    config.model = replace(config.model, exit_gate=True, **model)
    config.entropy_weight = Schedule.constant(0.1)
    share = config.total_tokens / TOTAL_TOKENS
    loss: dict[str, Any] = {
        name: value.stretched(share) if isinstance(value, Schedule) else value
        for name, value in options.items()
        if name not in model
    }
    config.loss = ReadableStepsLoss.Config(**loss)
    config.held_out.depths = list(DEPTHS)
    config.suite.depths = list(DEPTHS[:-1])
    return config


def _alone(steps: int) -> LoopTrainer.Config:
    """Return the layer trained for one R alone, by the loss of its last step."""
    config = deepcopy(_known()["last_step_muon"])
    config.model = replace(config.model, recurrent_steps=steps)
    config.recurrence.steps = Schedule.constant(steps)
    config.held_out.depths = list(DEPTHS)
    return config


def _gate(config: LoopTrainer.Config, updates: int) -> LoopTrainer.Config:
    """Return Stage II after a run: its model is frozen, and its gate learns on other text."""
    config.total_tokens = updates * BATCH_TOKENS
    config.learning_rate = Schedule.constant(1e-2)
    config.trainable, config.optimizer.name = "exit_gate", "adamw"
    config.loss = AdaptiveGateLoss.Config()
    config.dataloader = replace(config.dataloader, seed=5)
    config.checkpoint.carry.optimizer = False
    return config
