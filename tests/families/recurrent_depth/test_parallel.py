"""GPT-2's blocks on several ranks: numbers equal to one process, and the memory of a step."""

import pytest

from tests.distributed.test_memory import LONG, check_peak
from tests.distributed.test_parity import SEQ_LEN, Case, check_parity, runnable
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions

CASES = {
    "recurrent-depth": Case(
        steps=(3, 1),
        tie_weights=True,
        exit_gate=False,
        options=(("positions", "learned"), ("learned_positions", SEQ_LEN)),
        family=RecurrentDepthOptions,
    ),
}
LAYOUTS = ("dp2-tp2", "tp2-no-sp", "cp2", "dp2")


@pytest.mark.parametrize(
    ("layout", "case"), runnable((layout, c) for layout in LAYOUTS for c in CASES)
)
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, CASES[case])


def test_the_meter_s_peak_is_near_the_allocator_s(gloo_pool):
    settings = {"policy": "per_step", "checkpointing": "none", "dtype": "float32", "steps": 2}
    model = RecurrentDepthOptions(size="small")
    check_peak(gloo_pool, "other-blocks", {**LONG, **settings, "model": model})
