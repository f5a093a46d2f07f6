"""Readouts by step, against their formula."""

import pytest
import torch

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.families.ouro.step_readout import OuroDecoder
from titan_loop.models.family import build_decoder

TOKENS = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rank", [0, 2])
@torch.no_grad()
def test_every_step_is_read_by_its_own_map_and_deeper_ones_by_the_last(rank: int):
    options = OuroOptions(attention="sdpa", readout_rank=rank)
    model = build_decoder(options, max_seq_len=24).double()
    assert isinstance(model, OuroDecoder)
    readout = model.step_readout
    assert readout is not None
    for parameter in readout.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    got = model(TOKENS, recurrent_steps=5).hidden_RBLD
    model.step_readout = None  # states as the layers hand them on
    for r, state in enumerate(model(TOKENS, recurrent_steps=5).hidden_RBLD):
        row = min(r, 2)  # the debug model is built with three steps
        want = state * (1 + readout.scale[row])
        if readout.down is not None and readout.up is not None:
            want = want + state @ (readout.down[row] @ readout.up[row])
        torch.testing.assert_close(got[r], want, rtol=1e-12, atol=1e-12)
