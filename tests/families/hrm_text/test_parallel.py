"""Two stacks on several ranks and compiled: losses and gradients of one process."""

import pytest
import torch

from tests.distributed.test_compile import (
    COMPILED_TOLERANCE,
    SEQ_LEN,
    compare_gradients,
    model_of,
    parallelized,
)
from tests.distributed.test_parity import HELD, Case, check_parity, runnable
from titan_loop.distributed.compiler import missing_compiler
from titan_loop.families.hrm_text.model import HrmTextOptions

SHALLOW = (("n_layers", 2), ("low_cycles", 2))
CASES = {
    "all": Case(family=HrmTextOptions, exit_gate=False, steps=(2, 1)),
    "truncated": Case(
        family=HrmTextOptions,
        exit_gate=False,
        steps=(3, 2),
        options=SHALLOW,
        backward_steps=4,
        checkpointing="recurrent-step",
    ),
    "held-tied": Case(
        family=HrmTextOptions,
        tie_weights=True,
        exit_gate=False,
        steps=(2, 1),
        options=SHALLOW,
        fsdp=HELD,
        checkpointing="full",
        backward_steps=3,
    ),
    "gated": Case(family=HrmTextOptions, steps=(2, 1), options=SHALLOW, checkpointing="selective"),
}
PAIRS = [
    *(("dp2", case) for case in CASES),
    *(("tp2", case) for case in ("all", "truncated")),
    ("tp2-no-sp", "gated"),
    ("dp2-tp2", "held-tied"),
    ("hsdp2x2", "truncated"),
]


@pytest.mark.parametrize(("layout", "case"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, CASES[case])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason="inductor needs a C++ compiler")
def test_compiled_layers_are_the_same():
    options = HrmTextOptions(n_layers=2, low_cycles=2)
    eager, compiled = model_of(options), parallelized(model_of(options), enable=True)
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    columns = {"prefix": positions < 4}
    for model in (eager, compiled):
        model.recurrence.backward_steps = 3
    want, got = (
        model(tokens, positions, recurrent_steps=2, columns=columns).hidden_RBLD[-1]
        for model in (eager, compiled)
    )
    torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
    compare_gradients(compiled, got, eager, want)
