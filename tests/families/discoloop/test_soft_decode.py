"""Φ against its dense definition in float64: values, gradients, ties, memory, FLOPs."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.common.embedding import Embedding

from tests.models.test_readout import EXACT, LiveMemory
from titan_loop.families.discoloop.soft_decode import Decoding, soft_decode
from titan_loop.models.readout import LMHead

DECODINGS = [
    Decoding(),
    Decoding(temperature=0.3),
    Decoding(top_k=1),
    Decoding(top_k=4, temperature=2.0),
    Decoding(top_k=11),
]


def build(
    vocab: int, width: int, *, tied: bool, chunk_tokens: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[LMHead, Embedding]:
    torch.manual_seed(0)
    head = LMHead.Config(in_features=width, out_features=vocab, chunk_tokens=chunk_tokens).build()
    encoder = Embedding.Config(num_embeddings=vocab, embedding_dim=width).build()
    if tied:
        encoder.weight = head.weight
    return head.to(dtype), encoder.to(dtype)


def dense(hidden: Tensor, decoder: Tensor, encoder: Tensor, decoding: Decoding) -> Tensor:
    """The definition; of equal logits the smaller ids are kept."""
    logits = hidden @ decoder.T / decoding.temperature
    kept = torch.ones_like(logits, dtype=torch.bool)
    if decoding.top_k is not None:
        order = logits.sort(dim=-1, descending=True, stable=True).indices[..., : decoding.top_k]
        kept = torch.zeros_like(kept).scatter(-1, order, value=True)
    return logits.masked_fill(~kept, -torch.inf).softmax(-1) @ encoder


def inputs(width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 8, width, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randn(2, 8, width, generator=generator).double()


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_value_and_gradients_are_those_of_the_definition(decoding, tied, chunk_tokens):
    head, encoder = build(11, 6, tied=tied, chunk_tokens=chunk_tokens)
    hidden, grad = inputs()
    leaves = [hidden, head.weight] if tied else [hidden, head.weight, encoder.weight]
    want = dense(hidden, head.weight, encoder.weight, decoding)
    got = soft_decode(head, hidden, encoder, decoding)
    torch.testing.assert_close(got, want, **EXACT)
    found, wanted = (torch.autograd.grad(each, leaves, grad) for each in (got, want))
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [None, 3])
def test_equal_logits_are_kept_by_id(dtype, top_k):
    """In bf16 many logits are equal: the choice must not depend on chunks or kernels."""
    head, encoder = build(64, 4, tied=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(head.weight[torch.arange(64) % 5])  # thirteen of each
    hidden = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    decoding = Decoding(top_k=top_k)
    got = soft_decode(head, hidden, encoder, decoding)
    logits = hidden.float() @ head.weight.float().T
    wide = dense(hidden.double(), head.weight.double(), encoder.weight.double(), decoding)
    torch.testing.assert_close(got.double(), wide, rtol=0.02, atol=0.02)
    if top_k is not None:
        first = (logits[0, 0] == logits[0, 0].max()).nonzero()[:top_k, 0]
        assert len(first) == top_k
        mean = encoder.weight[first].double().mean(0)
        torch.testing.assert_close(got[0, 0].double(), mean, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(top_k=4)], ids=str)
def test_products_are_those_the_flops_say(decoding):
    head, encoder = build(11, 6, tied=False)
    hidden, grad = inputs()
    tokens, every, kept = 16, 2 * 6 * 11, 2 * 6 * (decoding.top_k or 11)
    forward, backward = decoding.training_flops(6, 11)
    with FlopCounterMode(display=False) as counter:
        decoded = soft_decode(head, hidden, encoder, decoding)
    assert counter.get_total_flops() == tokens * forward == tokens * (every + kept)
    with FlopCounterMode(display=False) as counter:
        decoded.backward(grad)
    # The counter sees scores and gradients of states, not sums into a table, which are as many; and
    # all logits once more if all have a gradient.
    again = every if decoding.top_k is None else 0
    assert counter.get_total_flops() - tokens * again == tokens * backward / 2


@pytest.mark.parametrize("top_k", [None, 8])
def test_no_more_than_a_chunk_of_logits_exists(top_k):
    """What grows with the tokens is states and the K tokens kept, never logits."""
    vocab, width, chunk_tokens, length = 4096, 16, 64, 256
    head, encoder = build(vocab, width, tied=True, chunk_tokens=chunk_tokens, dtype=torch.float32)
    decoding = Decoding(top_k=top_k)
    peaks, table, chunk = [], 4 * vocab * width, 4 * vocab * chunk_tokens
    for tokens in (length, 4 * length):
        hidden = torch.randn(1, tokens, width, requires_grad=True)
        head.zero_grad()
        with LiveMemory() as memory:
            decoded = soft_decode(head, hidden, encoder, decoding)
            decoded.square().sum().backward()
        assert memory.largest_bytes <= chunk
        peaks.append(memory.peak_bytes)
    # Tokens hold states, their gradients, and of the tokens kept an id and a probability.
    token_bytes = 4 * (6 * width + 4) + (0 if top_k is None else 8 * top_k)
    assert peaks[1] - peaks[0] <= 3 * length * token_bytes
    # A chunk, its products, and the gradient of the table, summed up and passed on.
    assert peaks[0] <= 2.5 * chunk + 3 * table + length * token_bytes
