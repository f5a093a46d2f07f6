"""Readouts by step, against their formula."""

import pytest
import torch
from torch import Tensor

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.families.ouro.step_readout import OuroDecoder
from titan_loop.models.family import build_decoder

TOKENS = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(0))


def made(**options) -> OuroDecoder:
    torch.manual_seed(1)
    model = build_decoder(OuroOptions(attention="sdpa", **options), max_seq_len=24).double()
    assert isinstance(model, OuroDecoder)
    if model.step_readout is not None:
        for parameter in model.step_readout.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def shared_states(model: OuroDecoder, steps: int) -> tuple[Tensor, ...]:
    """States as the layers hand them on, without any readout."""
    readout, model.step_readout = model.step_readout, None
    states = model(TOKENS, recurrent_steps=steps).hidden_RBLD
    model.step_readout = readout
    return states


@pytest.mark.parametrize("rank", [0, 2])
@torch.no_grad()
def test_every_step_is_read_by_its_own_map_and_deeper_ones_by_the_last(rank: int):
    model = made(readout_rank=rank)
    readout = model.step_readout
    assert readout is not None
    got = model(TOKENS, recurrent_steps=5).hidden_RBLD
    for r, state in enumerate(shared_states(model, 5)):
        row = min(r, 2)  # the debug model is built with three steps
        want = state * (1 + readout.scale[row])
        if readout.down is not None and readout.up is not None:
            want = want + state @ (readout.down[row] @ readout.up[row])
        torch.testing.assert_close(got[r], want, rtol=1e-12, atol=1e-12)
