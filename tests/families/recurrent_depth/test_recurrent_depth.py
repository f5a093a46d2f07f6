"""Recurrent depth: GPT-2's block from its formulas, the identity at the start, and what is refused.

That losses and gradients do not depend on the layout is a case of tests/distributed/test_parity.py.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.contracts.families import random_model
from tests.inference.reference import CONTEXT
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

EXACT = 1e-10  # both sides compute in float64
LEARNED = {"positions": "learned", "learned_positions": CONTEXT}


def build(**options) -> LoopDecoder:
    torch.manual_seed(0)
    return build_decoder(RecurrentDepthOptions(**options), max_seq_len=CONTEXT)


@pytest.fixture(scope="module")
def model() -> LoopDecoder:
    """Off the identity, in float64."""
    return random_model(RecurrentDepthOptions(**LEARNED), CONTEXT)


def normed(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


def block(weights: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    """GPT-2's block, token by token and head by head; x is (L, D)."""
    length, width = x.shape[0], x.shape[1] // heads
    h = normed(x, weights["attention_norm.weight"], weights["attention_norm.bias"])
    q, k, v = (
        h @ weights[f"attention.qkv_linear.{n}.weight"].T
        + weights[f"attention.qkv_linear.{n}.bias"]
        for n in ("wq", "wk", "wv")
    )
    attended = torch.zeros_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(length):
            scores = torch.stack([q[i, part] @ k[j, part] for j in range(i + 1)])
            attended[i, part] = (scores / math.sqrt(width)).softmax(0) @ v[: i + 1, part]
    x = x + attended @ weights["attention.wo.weight"].T + weights["attention_bias.weight"]
    h = normed(x, weights["ffn_norm.weight"], weights["ffn_norm.bias"])
    a = h @ weights["feed_forward.w1.weight"].T + weights["feed_forward.w1.bias"]
    a = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
    return x + a @ weights["feed_forward.w2.weight"].T + weights["ffn_bias.weight"]


@torch.no_grad()
def test_steps_are_gpt2s_blocks_without_a_norm_between_them(model):
    tokens = torch.randint(128, (1, 7), generator=torch.Generator().manual_seed(1))
    parameters = dict(model.named_parameters())
    x = parameters["tok_embeddings.weight"][tokens[0]]
    x = x + parameters["positions.table.weight"][:7]
    got = model(tokens, recurrent_steps=3)
    for state in got.hidden_RBLD:
        for layer in range(2):
            start = f"layers.{layer}."
            own = {n.removeprefix(start): p for n, p in parameters.items() if n.startswith(start)}
            x = block(own, x, heads=4)
        read = normed(x, parameters["norm.weight"], parameters["norm.bias"])
        torch.testing.assert_close(state[0], read, atol=EXACT, rtol=0)
        logits = model.readout(state)[0]
        tied = parameters["tok_embeddings.weight"]
        torch.testing.assert_close(logits, read @ tied.T, atol=EXACT, rtol=0)


@pytest.mark.parametrize("options", [LEARNED, {}], ids=["learned", "none"])
def test_forty_steps_are_the_identity_at_the_start_with_finite_gradients(options):
    model = build(**options).double()
    tokens = torch.randint(128, (2, 9))
    state = model(tokens, recurrent_steps=40, collect="last").hidden_RBLD[0]
    embedding = model.positions.embedded(model.tok_embeddings(tokens), torch.arange(9))
    assert torch.equal(state, model.norm(embedding))
    torch.nn.functional.cross_entropy(
        model.readout(state).flatten(0, 1), tokens.flatten()
    ).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    outputs = ("attention.wo.weight", "attention_bias.weight", "feed_forward.w2.weight")
    for name in outputs:
        assert model.get_parameter(f"layers.1.{name}").grad.abs().max() > 0


def test_the_published_sizes():
    """12 D² + 13 D parameters a block, as GPT-2's; tokens, positions and the final norm."""
    options = RecurrentDepthOptions(size="published", positions="learned", learned_positions=4)
    model = build_decoder(options, max_seq_len=4, device="meta")
    block_parameters = 12 * 768**2 + 13 * 768
    rest = 2200 * 768 + 4 * 768 + 2 * 768
    assert sum(p.numel() for p in model.parameters()) == 4 * block_parameters + rest
    flops = model.config.training_flops(3, 2)
    assert flops.matrices == 6 * 2 * 4 * 12 * 768**2
