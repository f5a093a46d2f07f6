"""Kinds of positions: each against a written-out forward pass, and generation against it."""

from dataclasses import replace

import pytest
import torch
from torchtitan.config import ParallelismConfig

from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT
from tests.models.reference import reference_forward
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder, decoder_config

EXACT = 1e-11  # float64 throughout: without a rotary table nothing is rounded to fp32
KINDS = {
    "learned": {"learned_positions": CONTEXT},
    "none": {},
    "relative": {"relative_window": 5},
    "deberta": {"relative_window": 5},
    "bias": {"relative_window": 5},
}


def make_model(kind: str):
    torch.manual_seed(0)
    options = OuroOptions(positions=kind, n_kv_heads=4, **KINDS[kind])
    model = build_decoder(options, max_seq_len=CONTEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_forward_agrees_with_the_float64_reference(kind):
    model = make_model(kind)
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    whole = torch.arange(16).expand(2, -1)
    documents = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)
    for given, positions in ((None, whole), (documents, documents)):
        output = model(tokens, given)
        read, logits = reference_forward(model, tokens, positions, 3, kind=kind)
        got = output.hidden_RBLD + output.exit_logit_RBL
        for one, want in zip(got, read + logits, strict=True):
            torch.testing.assert_close(one, want, atol=EXACT, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_the_full_forward(kind):
    check_generation(make_model(kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"positions": "learned"},
            "model.positions=learned needs model.learned_positions of at least",
        ),
        ({"positions": "relative", "relative_window": 0}, "needs model.relative_window of at"),
        (
            {"learned_positions": 64},
            "model.learned_positions=64 has no effect with model.positions=rope",
        ),
        ({"positions": "learn"}, "model.positions=learn is unknown; nearest: learned"),
        (
            {"positions": "learned", "learned_positions": 31},
            "model.learned_positions=31 is less than the 32 tokens of a window",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, message):
    with pytest.raises(UserError, match=message) as raised:
        decoder_config(OuroOptions(**options), max_seq_len=32)
    assert "\n" not in str(raised.value)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["relative", "deberta", "bias"])
def test_fewer_keys_than_queries_are_repeated(kind):
    options = OuroOptions(positions=kind, **KINDS[kind])
    whole = make_model(kind)
    grouped = build_decoder(replace(options, n_kv_heads=2), max_seq_len=CONTEXT).double().eval()
    weights = whole.state_dict()
    for name, weight in grouped.state_dict().items():
        if name.endswith(("wk.weight", "wv.weight")):
            weights[name] = weight.normal_().view(2, 1, 16, -1).repeat(1, 2, 1, 1).flatten(0, 2)
        else:
            weight.copy_(weights[name])
    whole.load_state_dict(weights)
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    one, other = (model(tokens).hidden_RBLD[-1] for model in (whole, grouped))
    torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_relative_positions_are_not_spread(name):
    config = decoder_config(OuroOptions(positions="relative", relative_window=4), max_seq_len=32)
    degrees = {"tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    config.check_spreading(**degrees)
    assert hasattr(ParallelismConfig(), f"{name}_degree")  # the flag that the message names
    with pytest.raises(UserError, match=f"parallelism.{name}_degree=2 does not work with"):
        config.check_spreading(**degrees | {name: 2})


def test_the_kind_and_its_size_stand_in_the_architecture():
    kinds = [
        {},
        {"positions": "none"},
        *({"positions": "learned", "learned_positions": rows} for rows in (32, 64)),
        *({"positions": "relative", "relative_window": window} for window in (4, 8)),
        {"positions": "deberta", "relative_window": 4},
        {"positions": "bias", "relative_window": 4},
    ]
    records = [decoder_config(OuroOptions(**kind), max_seq_len=32).architecture() for kind in kinds]
    assert len({str(record) for record in records}) == len(kinds)
    for kind, record in zip(kinds, records, strict=True):
        assert kind.items() <= record.items()
