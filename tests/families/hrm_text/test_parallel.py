"""Two stacks on several ranks: losses and gradients of one process."""

import pytest
import titan_loop.compat as compat
import torch
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import utils as dist_utils

from tests.distributed.parallel_model import global_loss, parallel_model, whole_gradients
from tests.distributed.test_compile import SEQ_LEN
from tests.distributed.test_parity import RELATIVE_TOLERANCE
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.models.family import decoder_config


def prefixed(context_parallel: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and whole gradients of a step in which prompts are read in both directions."""
    config = decoder_config(HrmTextOptions(n_layers=2, low_cycles=2), max_seq_len=SEQ_LEN)
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
