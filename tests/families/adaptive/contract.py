"""Cases of layers that loop, with and without memory."""

from functools import partial
from typing import Any

from tests.contracts.families import Compiled, Contract
from tests.distributed.test_parity import HELD, Case
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.families.adaptive.model import AdaptiveOptions
from titan_loop.families.adaptive.objective import PonderCostLoss
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

MEMORY: dict[str, Any] = {"local_slots": 5, "global_slots": 7}


def case(checkpointing: str = "none", held: bool = False, **options) -> Case:
    """Return a case with α at 0 rather than -7, so that the loops have gradients."""
    make = partial(Case, fsdp=HELD) if held else Case
    return make(
        family=AdaptiveOptions,
        steps=(1, 1),
        exit_gate=False,
        checkpointing=checkpointing,
        options=tuple({"scale_init": 0.0, **options}.items()),
        loss=PonderCostLoss.Config(ponder_weight=0.3),
    )


def rehearsed(config: LoopTrainer.Config) -> None:
    """Selective checkpointing recomputes FSDP units inside of a layer."""
    config.model = AdaptiveOptions(max_iterations=2, n_layers=1, local_slots=5, vocab_size=512)
    config.recurrence.steps, config.loss = Schedule.constant(1), PonderCostLoss.Config()
    config.activation_checkpoint = SelectiveAC.Config()


CONTRACT = Contract(
    parity={
        "memory": (case(**MEMORY), "tp2-no-sp tp2"),
        "memory-full": (case("full", held=True, **MEMORY), "cp2"),
        "memory-selective": (case("selective", **MEMORY), "dp2"),
        "by-step": (case("recurrent-step", held=True, **MEMORY), "dp2"),
    },
    compiled={"memory": Compiled(AdaptiveOptions(scale_init=0.0, **MEMORY), steps=1)},
    rehearsed={"layers that loop": rehearsed},
    refused=[
        (AdaptiveOptions(gate_bias=0.0), "model.gate_bias=0.0 has no effect without memory"),
        (AdaptiveOptions(max_iterations=None, scale_init=-3.0), "model.scale_init=-3.0 has no eff"),
        (
            AdaptiveOptions(max_iterations=None, decay_controls=True),
            "model.decay_controls=True has no effect without loops",
        ),
        (AdaptiveOptions(exit_gate=True), "model.exit_gate=True does not work with model.family="),
    ],
)
