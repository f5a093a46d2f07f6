"""Masks and kernels: the explicit mask against its definition, Flex in eager form against it."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from titan_loop import compat
from titan_loop.distributed.context_parallel import window_share
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models import attention
from titan_loop.models import loop_config as ouro
from titan_loop.models.attention import (
    DocumentAttention,
    document_block_mask,
    document_mask,
    inner_attention_config,
)
from titan_loop.models.context import WindowShare
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder, decoder_config

LENGTHS = (50, 1, 77)
# The eager kernel takes its softmax in fp32 in another order.
FP32_TOLERANCE = 2e-5


def positions() -> torch.Tensor:
    row = torch.cat([torch.arange(length) for length in LENGTHS])
    return torch.stack([row, torch.arange(len(row))])


def test_the_mask_allows_exactly_earlier_tokens_of_the_same_document():
    mask = document_mask(positions())
    assert mask.shape == (2, 1, 128, 128)
    document = [index for index, length in enumerate(LENGTHS) for _ in range(length)]
    for query in range(128):
        for key in range(128):
            same = document[query] == document[key]
            assert bool(mask[0, 0, query, key]) == (same and key <= query)
            assert bool(mask[1, 0, query, key]) == (key <= query)


@pytest.mark.parametrize("degree", [2, 4])
def test_shares_of_a_window_see_what_the_whole_window_sees(monkeypatch, degree):
    """Masks of SDPA and Flex, with the keys in the order in which ranks deliver them."""
    monkeypatch.setattr(titan_attention, "_compiled_create_block_mask", create_block_mask)
    whole = document_mask(positions())[:, 0]
    seen = []
    for rank in range(degree):
        share = window_share(128, degree=degree, rank=rank)
        queries, keys = share
        seen.append(queries)
        want = whole[:, queries][:, :, keys]
        assert torch.equal(document_mask(positions(), share)[:, 0], want)
        flex = document_block_mask(positions(), share, 128)
        b, q, k = torch.meshgrid(
            torch.arange(2), torch.arange(len(queries)), torch.arange(128), indexing="ij"
        )
        assert torch.equal(flex.mask_mod(b, torch.tensor(0), q, k), want)
        assert flex.shape == (2, 1, 128 // degree, 128)
    assert torch.equal(torch.cat(seen), keys)
    assert torch.equal(keys.sort().values, torch.arange(128))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        OuroOptions(size="debugmodel"),
        DenseOptions(size="debugmodel", n_kv_heads=1, qk_norm="all", attention_softcap=0.5),
    ],
)
def test_flex_attention_in_eager_form_agrees_with_the_explicit_mask(monkeypatch, options):
    """The CUDA path's mask and wiring, run with the uncompiled kernel on CPU."""
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(titan_attention, "_compiled_create_block_mask", create_block_mask)
    torch.manual_seed(0)
    reference = build_decoder(options, max_seq_len=128)
    monkeypatch.setattr(ouro, "inner_attention_config", lambda _, scores: FlexAttention.Config())
    flex = build_decoder(options, max_seq_len=128)
    flex.load_state_dict(reference.state_dict())
    tokens = torch.randint(128, (2, 128))
    with torch.no_grad():
        want = reference(tokens, positions())
        for got in (
            flex(tokens, positions()),
            flex(tokens, positions(), flex.get_attention_masks(positions())),
        ):
            torch.testing.assert_close(
                got.hidden_RBLD[-1], want.hidden_RBLD[-1], atol=FP32_TOLERANCE, rtol=0
            )


def test_different_lengths_need_a_mask_but_for_one_query():
    kernel = DocumentAttention(DocumentAttention.Config())
    q, kv = torch.randn(1, 2, 2, 8), torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match="2 queries and 3 keys need an explicit mask"):
        kernel(q, kv, kv)
    assert kernel(q, kv, kv, attention_masks=torch.ones(1, 1, 2, 3).bool()).shape == q.shape
    last, everything = q[:, 1:], torch.ones(1, 1, 1, 3).bool()
    for scores in (None, torch.randn(1, 2, 1, 3)):
        seen = kernel(last, kv, kv, scores_BNLS=scores)
        masked = kernel(last, kv, kv, attention_masks=everything, scores_BNLS=scores)
        torch.testing.assert_close(seen, masked, atol=FP32_TOLERANCE, rtol=0)


def test_varlen_says_which_package_a_gpu_needs(monkeypatch):
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    monkeypatch.setattr(attention, "get_cuda_flash_attention_impl", lambda: "FA3")
    with pytest.raises(UserError, match="needs FA3 on this GPU: flash_attn_interface is"):
        inner_attention_config("varlen")
    monkeypatch.setattr(attention, "get_cuda_flash_attention_impl", lambda: None)  # Ampere
    assert isinstance(inner_attention_config("varlen"), VarlenAttention.Config)


def test_a_prefix_is_seen_whole_in_its_own_document(monkeypatch):
    monkeypatch.setattr(titan_attention, "_compiled_create_block_mask", create_block_mask)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    prefix = torch.tensor([[True, True, False, True, True, False]])
    want = torch.tensor([
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]).bool()  # fmt: skip
    zero = torch.tensor(0)
    for share in (None, WindowShare(torch.tensor([0, 2, 3, 5]), torch.randperm(6))):
        part = want if share is None else want[share.queries_L][:, share.keys_L]
        assert torch.equal(document_mask(positions, share, prefix)[0, 0], part)
        flex = document_block_mask(positions, share, 128, prefix)
        queries, keys = (torch.arange(size) for size in part.shape)
        assert torch.equal(flex.mask_mod(zero, zero, queries[:, None], keys), part)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("added", [True, False])
def test_the_kernel_is_causal_and_scales_products_and_added_scores(scale, added):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, 9, generator=generator).double() for _ in range(3))
    k, v = k[:, :, :2], v[:, :, :2]  # two heads of queries a head of keys
    scores = torch.randn(2, 4, 5, 5, generator=generator).double()
    kernel = DocumentAttention(DocumentAttention.Config())
    more = {"scores_BNLS": scores} if added else {"enable_gqa": True}
    got = kernel(q, k, v, scale=scale, **more)
    for row, head, query in ((0, 0, 0), (0, 1, 2), (1, 2, 3), (1, 3, 4)):
        products = k[row, : query + 1, head // 2] @ q[row, query, head]
        if added:
            products = products + scores[row, head, query, : query + 1]
        weights = (products * (1 / 3 if scale is None else scale)).softmax(0)
        want = weights @ v[row, : query + 1, head // 2]
        torch.testing.assert_close(got[row, query, head], want)


def test_the_kernel_of_a_name(monkeypatch):
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    assert isinstance(inner_attention_config("auto"), FlexAttention.Config)
    assert isinstance(inner_attention_config("auto", scores=True), DocumentAttention.Config)
    options = OuroOptions(positions="relative", relative_window=8, attention="flex")
    with pytest.raises(UserError, match=r"positions=relative needs model\.attention=sdpa or auto"):
        decoder_config(options, max_seq_len=128)
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    assert isinstance(inner_attention_config("auto"), DocumentAttention.Config)
