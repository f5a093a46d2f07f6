"""Input injection: every step reads the embedding again, against the equations written out."""

import pytest
import torch

from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT
from tests.models.reference import reference_forward
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder, decoder_config

ROTATION = 2e-5  # the rotary table is fp32: 1e-7 relative, amplified by 8 layers
EXACT = 1e-11  # float64, another order of sums
STEPS = 4
KINDS = ["additive", "diagonal"]


def make_model(kind: str):
    torch.manual_seed(0)
    model = build_decoder(OuroOptions(injection=kind), max_seq_len=CONTEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        if kind == "diagonal":
            model.injection.weight.normal_()
    return model.double().eval()


def mixed(kind, weights, embedding, state):
    if kind == "additive":
        return state + embedding
    rate = 1 / (1 + (-weights["injection.weight"]).exp())
    return rate * state + (1 - rate) * embedding


def batch():
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_forward_agrees_with_the_float64_reference(kind):
    model, (tokens, positions) = make_model(kind), batch()
    output = model(tokens, positions, recurrent_steps=STEPS)

    def following(weights, embedding, states):
        return mixed(kind, weights, embedding, states[-1])

    read, logits = reference_forward(model, tokens, positions, STEPS, following)
    for got, want in zip(output.hidden_RBLD + output.exit_logit_RBL, read + logits, strict=True):
        torch.testing.assert_close(got, want, atol=ROTATION, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_the_full_forward(kind):
    check_generation(make_model(kind))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_steps_still_train_the_embedding_they_read(kind, recompute):
    """Only the states of earlier steps are constants; the last step's own e is not."""
    model, (tokens, positions) = make_model(kind), batch()
    weights = dict(model.named_parameters())
    embedding = model.tok_embeddings(tokens)
    context = model.make_context(tokens, positions)
    states = list(model(tokens, positions, recurrent_steps=STEPS - 1).hidden_RBLD)
    layers, hidden = model.layers.values(), mixed(kind, weights, embedding, states[-1].detach())
    for layer in layers:
        hidden = layer(hidden, context)
    (model.norm(hidden) ** 3).sum().backward()
    want = {name: value.grad for name, value in model.named_parameters()}

    model.zero_grad()
    model.recurrence.backward_steps = 1
    if recompute:
        RecurrentStepAC.Config().build().apply(model)
    (model(tokens, positions, recurrent_steps=STEPS).hidden_RBLD[-1] ** 3).sum().backward()
    assert want["tok_embeddings.weight"].abs().sum() > 0
    for name, value in model.named_parameters():
        if want[name] is None:
            assert value.grad is None, name
        else:
            torch.testing.assert_close(value.grad, want[name], rtol=EXACT, atol=EXACT)


def test_the_first_step_reads_the_embedding_under_every_kind():
    tokens, positions = batch()
    plain = make_model("additive")
    for kind in ("none", "diagonal"):
        other = make_model(kind)
        other.load_state_dict(plain.state_dict(), strict=False)
        states = [m(tokens, positions, recurrent_steps=2).hidden_RBLD for m in (plain, other)]
        torch.testing.assert_close(states[0][0], states[1][0], rtol=EXACT, atol=EXACT)
        assert not torch.allclose(states[0][1], states[1][1])


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match=r"model\.injection=addition is unknown; nearest: additive"):
        decoder_config(OuroOptions(injection="addition"), max_seq_len=8)
