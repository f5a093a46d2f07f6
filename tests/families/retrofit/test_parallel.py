"""Retrofitted models on several ranks: losses and gradients of one process."""

from functools import partial

import pytest

from tests.distributed.test_parity import HELD, Case, check_parity, runnable
from titan_loop.families.retrofit.model import RetrofitOptions

SPLIT = (("n_layers", 3), ("prelude_layers", 1), ("coda_layers", 1))
case = partial(Case, family=RetrofitOptions, exit_gate=False, steps=(3, 1))
CASES = {
    "bridge": case(options=(*SPLIT, ("bridge", True)), fsdp=HELD),
    "truncated": case(
        tie_weights=True,
        options=(*SPLIT, ("bridge", True), ("damping", 2)),
        backward_steps=2,
        checkpointing="recurrent-step",
    ),
    "adapters": case(
        options=(*SPLIT, ("adapter_rank", 3), ("adapter_sets", 2)),
        checkpointing="full",
    ),
    "mixer": case(
        options=(*SPLIT, ("mixer", True)),
        backward_steps=2,
    ),
    "new": case(
        options=(
            *SPLIT,
            ("bridge", True),
            ("adapter_rank", 2),
            ("adapter_first_step", 2),
            ("trained", "new"),
        ),
        steps=(3, 2),
    ),
}
PAIRS = [
    *(("dp2", case) for case in CASES),
    ("tp2", "bridge"),
    ("tp2-no-sp", "bridge"),
    ("dp2-tp2", "truncated"),
    ("cp2", "bridge"),
    ("tp2", "adapters"),
    ("tp2-no-sp", "adapters"),
    ("tp2", "new"),
    ("tp2", "mixer"),
]


@pytest.mark.parametrize(("layout", "case"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, CASES[case])
