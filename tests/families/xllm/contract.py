"""Cases of xLLM-Loop's injections and states."""

from pathlib import Path

from tests.contracts.families import Contract, Generated, Run
from tests.contracts.runs import small_run
from tests.distributed.test_parity import HELD, Case
from titan_loop.families.xllm.depth import capped_depths
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.families.xllm.prior import LearnedDepth, PriorSettings
from titan_loop.inference.exit_policy import Confidence
from titan_loop.training.callback import Callback
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

DEPTHS = capped_depths(2.5, 0.5, 6).tolist()
STEPS = 8


def case(
    layouts: str, checkpointing: str = "none", backward_steps: int | None = None, **options
) -> tuple[Case, str]:
    """Return a case of one looped layer; without noise, which ranks with other rows would draw."""
    chosen = {"start_state": "zero", "n_layers": 3, **options}
    return Case(
        family=XllmOptions,
        exit_gate=False,
        steps=(3, 1),
        options=tuple(chosen.items()),
        checkpointing=checkpointing,
        backward_steps=backward_steps,
        fsdp=HELD if checkpointing == "recurrent-step" else Case().fsdp,
    ), layouts


def drawn_run(folder: Path, *depths: Callback) -> LoopTrainer.Config:
    """Return a run of drawn depths up to 6, truncated at 2."""
    config = small_run(folder, XllmOptions(start_state="zero", injection="orthogonal"), steps=STEPS)
    config.recurrence = RecurrenceConfig(
        steps=Schedule.constant(2.5),
        poisson=True,
        lognormal_sigma=0.5,
        max_steps=6,
        backward_steps=2,
    )
    config.callbacks = depths
    return config


def learned_run(folder: Path, world: int) -> LoopTrainer.Config:
    """Return a run whose distribution of depths learns from every step but the first."""
    settings = PriorSettings(burn_in=1, rate=0.3, mean=2.5)
    return drawn_run(folder, LearnedDepth(DEPTHS, settings=settings))


def generated(**options) -> Generated:
    """Return a model whose start does not depend on the batch."""
    return Generated(XllmOptions(exit_gate=False, **options), Confidence(0.08))


CONTRACT = Contract(
    parity={
        "truncated": case("dp2", "recurrent-step", 2, prelude_norm=True),
        "shared": case("tp2", "selective", injection="orthogonal", states="shared", low_cycles=2),
        "noise": case("tp2-no-sp", "recurrent-step", start_state="normal", prelude_norm=True),
        "split": case("cp2", "full", n_layers=4, states="split", low_cycles=2, core_passes=2),
        "untied": case(
            "tp2",
            "full",
            n_layers=4,
            untied_steps=2,
            start_state="input",
            injection="linear",
            state_norm=True,
        ),
    },
    generated={
        "diagonal": generated(),
        "split": generated(states="split", core_passes=2, low_cycles=1),
        "untied": generated(untied_steps=2, prelude_norm=True),
    },
    runs={"learned": Run(learned_run, close=("depth_prior/mean", "depth_prior/entropy"))},
    refused=[
        (XllmOptions(injection="none"), "model.injection=none with model.start_state=normal"),
        (XllmOptions(states="split", n_layers=5), "model.states=split needs an even number of"),
        (
            XllmOptions(norm_placement="every_step"),
            "model.norm_placement=every_step has no effect here, model.state_norm has",
        ),
        (XllmOptions(low_cycles=2), "model.low_cycles=2 has no effect with model.states=one"),
        (
            XllmOptions(injection="linear", injection_step=0.5),
            "model.injection_step=0.5 has no effect with model.injection=linear",
        ),
        (XllmOptions(untied_steps=3), "model.untied_steps=3 must divide the 2 looped layers"),
    ],
)
