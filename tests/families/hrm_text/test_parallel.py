"""Two stacks on several ranks and compiled: losses and gradients of one process."""

import pytest
import titan_loop.compat as compat
import torch
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import utils as dist_utils

from tests.distributed.parallel_model import global_loss, parallel_model, whole_gradients
from tests.distributed.test_compile import (
    COMPILED_TOLERANCE,
    SEQ_LEN,
    compare_gradients,
    model_of,
    parallelized,
)
from tests.distributed.test_parity import (
    HELD,
    RELATIVE_TOLERANCE,
    Case,
    check_parity,
    runnable,
)
from titan_loop.distributed.compiler import missing_compiler
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.models.family import decoder_config

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
    ("cp2", "truncated"),
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


def prefixed(context_parallel: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and whole gradients of a step in which prompts are read in both directions."""
    config = decoder_config(HrmTextOptions(**dict(SHALLOW)), max_seq_len=SEQ_LEN)
    parallelism = ParallelismConfig(context_parallel_degree=context_parallel)
    parallelism.spmd_backend = compat.SPMD_BACKEND
    model, dims = parallel_model(config, parallelism)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (2, SEQ_LEN), generator=generator)
    weight = torch.randn(2, SEQ_LEN, 64, generator=generator)
    positions = (torch.arange(SEQ_LEN) % 11).expand(2, -1).contiguous()
    prefix = positions < torch.tensor([[7], [3]])
    share = share_of_rank(dims, SEQ_LEN, "cpu")
    masks = model.get_attention_masks(positions, share, prefix)
    if share is not None:
        tokens, positions, weight = (x[:, share.queries_L] for x in (tokens, positions, weight))
    with dist_utils.get_spmd_context(parallel_dims=dims)():
        output = model(tokens, positions, masks, recurrent_steps=2, collect="last")
        loss = (output.hidden_RBLD[-1] * weight).sum()
        loss.backward()
    return global_loss(loss, dims), whole_gradients(model)


@pytest.mark.multiprocess
def test_ranks_that_share_a_window_share_its_prefixes(gloo_pool):
    want, expected = prefixed(1)
    for loss, gradients in gloo_pool(2).run(prefixed, 2):
        assert loss == pytest.approx(want, rel=RELATIVE_TOLERANCE)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            close = RELATIVE_TOLERANCE * float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], atol=close, rtol=0)
