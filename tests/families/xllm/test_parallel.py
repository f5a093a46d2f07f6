"""Injections, norms and states of both kinds on several ranks, against one process."""

import pytest

from tests.distributed.test_parity import HELD, Case, check_parity, runnable
from titan_loop.families.xllm.model import XllmOptions


def case(checkpointing: str = "none", backward_steps: int | None = None, **options) -> Case:
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
    )


CASES = {
    "diagonal": case(prelude_norm=True),
    "truncated": case("recurrent-step", 2),
    "orthogonal": case("selective", injection="orthogonal"),
    "linear": case("full", injection="linear", state_norm=True),
    "noise": case("recurrent-step", start_state="normal"),
    "shared": case(states="shared", low_cycles=2),
    "split": case("full", n_layers=4, states="split", low_cycles=2, core_passes=2),
    "untied": case(n_layers=4, untied_steps=2, start_state="input"),
}
PAIRS = [
    *(
        (layout, name)
        for layout in ("dp2", "tp2", "cp2")
        for name in ("diagonal", "orthogonal", "linear", "shared", "split")
    ),
    ("dp2", "truncated"),
    ("tp2-no-sp", "diagonal"),
    ("tp2", "noise"),
    ("tp2-no-sp", "noise"),
    ("dp2-tp2", "untied"),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("layout", "name"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, name):
    check_parity(gloo_pool, layout, CASES[name])
