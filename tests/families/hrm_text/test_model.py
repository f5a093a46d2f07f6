"""HRM-Text against its equations in float64: states, masks, reach of the gradient, costs."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.families.hrm_text.reference import cycles
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, decoder_config

CLOSE = 1e-5  # float64, but the model's table of rotations is fp32, read in up to 24 passes
LENGTH = 14


def make(**options) -> LoopDecoder:
    """Return a model in float64 whose every weight matters."""
    torch.manual_seed(3)
    chosen = {"n_layers": 4, "recurrent_steps": 3, "low_cycles": 2, **options}
    model = build_decoder(HrmTextOptions(**chosen), max_seq_len=32).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def tokens(rows: int = 1) -> torch.Tensor:
    """Return random tokens, (rows, LENGTH)."""
    return torch.randint(128, (rows, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recurrent_steps": 1, "low_cycles": 1},
        {"low_cycles": 4, "embedding_scale": 2.5, "rope_theta": 500.0, "norm_eps": 1e-2},
    ],
)
@pytest.mark.parametrize("prefix", [0, 6])
def test_states_are_those_of_the_equations(options, prefix):
    model = make(**options)
    column = (torch.arange(LENGTH) < prefix)[None]
    output = model(tokens(), columns={"prefix": column})
    assert len(output.hidden_RBLD) == model.recurrent_steps
    want = [*cycles(model, tokens()[0], prefix=prefix)]
    torch.testing.assert_close([s[0] for s in output.hidden_RBLD], want, atol=CLOSE, rtol=0)


def test_a_prefix_is_its_documents_alone():
    model = make()
    positions = torch.tensor([[*range(6), *range(LENGTH - 6)]])
    column = torch.tensor([[True] * 3 + [False] * 3 + [True] * 5 + [False] * 3])
    state = model(tokens(), positions, columns={"prefix": column}).hidden_RBLD[-1][0]
    for here, prefix in ((slice(0, 6), 3), (slice(6, LENGTH), 5)):
        *_, want = cycles(model, tokens()[0, here], prefix=prefix)
        torch.testing.assert_close(state[here], want, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 9, 12, None])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_passes_through_the_last_k_passes(k, checkpointed):
    model = make()
    if checkpointed:
        model.recurrence.wrap = lambda part: partial(
            checkpoint, part, use_reentrant=False, preserve_rng_state=False
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert model.state_dict().keys() - trained.keys() == {"low_start.weight"}
    short = tokens()[:, :6]
    weight = torch.randn(6, 64, dtype=torch.float64)
    *_, last = cycles(model, short[0], k=k)
    own, want = (
        torch.autograd.grad((state * weight).sum(), [*trained.values()], allow_unused=True)
        for state in (model(short, backward_steps=k).hidden_RBLD[-1][0], last)
    )
    for mine, reference in zip(own, want, strict=True):
        scale = 0.0 if reference is None else float(reference.abs().max())
        torch.testing.assert_close(mine, reference, atol=CLOSE * scale, rtol=0)


def test_costs_count_passes():
    config = decoder_config(HrmTextOptions(size="1b"), max_seq_len=4096)
    assert config.layer_visits(2) == (2 * 4 * 16, 2 * 4 * 16)
    assert config.layer_visits(2, 5) == (2 * 4 * 16, 5 * 16)
    assert config.layer_visits(2, 0) == (2 * 4 * 16, 0)
    assert config.layer_visits(2.4, 2.7) == pytest.approx((2.4 * 4 * 16, 2.7 * 16))  # means
    flops = config.training_flops(4096, 2, backward_steps=5)
    layer = 5 * 1536**2 + 3 * 1536 * 4096
    assert flops.matrices == (2 * 128 + 4 * 80) * layer


@pytest.mark.parametrize(("size", "millions"), [("b", 300), ("l", 695), ("1b", 1183)])
def test_the_released_sizes(size, millions):
    model = build_decoder(HrmTextOptions(size=size), max_seq_len=8, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
