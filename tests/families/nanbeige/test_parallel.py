"""Llama blocks on several ranks and compiled: losses and gradients of one process."""

from functools import partial

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
from titan_loop.families.nanbeige.model import NanbeigeOptions

SPLIT = (("n_layers", 3), ("prelude_layers", 1), ("coda_layers", 1))
case = partial(Case, family=NanbeigeOptions, steps=(3, 1))
CASES = {
    "loop": case(exit_gate=False),
    "normed-tied": case(
        tie_weights=True,
        exit_gate=False,
        options=(("norm_placement", "every_step"),),
        checkpointing="selective",
    ),
    "gated": case(checkpointing="full", fsdp=HELD),
    "split": case(exit_gate=False, options=SPLIT, backward_steps=2),
}
PAIRS = [
    *(("dp2", case) for case in CASES),
    *(("tp2", case) for case in ("loop", "split")),
    ("tp2-no-sp", "gated"),
    ("dp2-tp2", "normed-tied"),
    ("hsdp2x2", "split"),
    ("cp2", "loop"),
]


@pytest.mark.parametrize(("layout", "case"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, CASES[case])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason="inductor needs a C++ compiler")
def test_compiled_layers_are_the_same():
    options = NanbeigeOptions(n_layers=1)
    eager, compiled = model_of(options), parallelized(model_of(options), enable=True)
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    want, got = (
        model(tokens, positions, recurrent_steps=3).hidden_RBLD[-1] for model in (eager, compiled)
    )
    torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
    compare_gradients(compiled, got, eager, want)
