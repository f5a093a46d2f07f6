"""The decoded channel on several ranks and compiled: numbers, bytes, and states that travel."""

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
from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions

DISCO = {"family": DiscoLoopOptions, "tie_weights": True}
CASES = {
    "disco": Case(family=DiscoLoopOptions, tie_weights=True, exit_gate=False),
    "disco-learned-full": Case(
        family=DiscoLoopOptions,
        tie_weights=True,
        options=(("channel_gate", "learned"), ("top_k", 5), ("temperature", 0.5)),
        checkpointing="full",
    ),
    "disco-held-by-step": Case(
        family=DiscoLoopOptions,
        tie_weights=True,
        exit_gate=False,
        options=(("channel_gate", "learned"),),
        checkpointing="recurrent-step+full",
        fsdp=FSDPConfig(policy="per_step"),
    ),
    "disco-selective": Case(
        family=DiscoLoopOptions,
        tie_weights=True,
        options=(("channel_gate", "learned"), ("top_k", 5)),
        checkpointing="selective",
    ),
    "disco-held-offloaded": Case(
        family=DiscoLoopOptions, tie_weights=True, checkpointing="full-offload", fsdp=HELD
    ),
    "disco-always-truncated": Case(
        family=DiscoLoopOptions, tie_weights=True, reshard="always", backward_steps=2
    ),
    "ponder-always": Case(
        family=PonderOptions,
        options=(("top_k", 9), ("normalised_over", "vocabulary")),
        reshard="always",
        checkpointing="selective",
    ),
    "ponder-never": Case(family=PonderOptions, reshard="never", options=(("top_k", 9),)),
    "ponder-held": Case(family=PonderOptions, tie_weights=True, fsdp=FSDPConfig(policy="per_step")),
}
PAIRS = [
    *(("dp2", case) for case in CASES),
    *(("tp2", case) for case in ("disco", "disco-learned-full", "ponder-always")),
    *(("tp2-no-sp", case) for case in ("disco-learned-full", "ponder-never")),
    *(("dp2-tp2", case) for case in ("disco-selective", "disco-held-by-step")),
    *(("hsdp2x2", case) for case in ("disco-always-truncated", "ponder-held")),
    ("cp2", "disco-learned-full"),
    ("hsdp2x2-cp2", "disco"),
    ("dp2-cp2-tp2", "ponder-always"),
]


@pytest.mark.parametrize(("layout", "case"), runnable(PAIRS))
def test_losses_and_gradients_equal_one_process(gloo_pool, layout, case):
    check_parity(gloo_pool, layout, CASES[case])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("top_k", [None, 8])
def test_what_is_decoded_between_compiled_layers_is_the_same(top_k):
    options = DiscoLoopOptions(size="debugmodel", n_layers=1, channel_gate="learned", top_k=top_k)
    eager, compiled = model_of(options), parallelized(model_of(options), enable=True)
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    want, got = (
        model(tokens, positions, recurrent_steps=3).hidden_RBLD[-1] for model in (eager, compiled)
    )
    torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
    compare_gradients(compiled, got, eager, want)
    assert eager.channel.weight.grad.abs().max() > 0
