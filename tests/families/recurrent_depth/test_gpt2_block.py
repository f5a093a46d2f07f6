"""A block of the family recurrent_depth is transformers' GPT2Block."""

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions
from titan_loop.models.family import build_decoder

EXACT = 1e-10  # both sides compute in float64
LENGTH = 11


def converted(own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield GPT2Block's parameters; its projections are stored as (inputs, outputs)."""
    for ours, theirs in (("attention_norm", "ln_1"), ("ffn_norm", "ln_2")):
        for kind in ("weight", "bias"):
            yield f"{theirs}.{kind}", own[f"{ours}.{kind}"]
    for kind in ("weight", "bias"):
        parts = [own[f"attention.qkv_linear.{name}.{kind}"] for name in ("wq", "wk", "wv")]
        yield f"attn.c_attn.{kind}", torch.cat(parts).T
        yield f"mlp.c_fc.{kind}", own[f"feed_forward.w1.{kind}"].T
    yield "attn.c_proj.weight", own["attention.wo.weight"].T
    yield "attn.c_proj.bias", own["attention_bias.weight"]
    yield "mlp.c_proj.weight", own["feed_forward.w2.weight"].T
    yield "mlp.c_proj.bias", own["ffn_bias.weight"]


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_block_equals_gpt2s_with_its_gradients(transformers):
    torch.manual_seed(0)
    model = build_decoder(RecurrentDepthOptions(), max_seq_len=LENGTH).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    block = model.layers["0"]
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_inner=256, attn_implementation="eager", resid_pdrop=0.0
    )
    gpt2_module = importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    gpt2 = gpt2_module.GPT2Block(config).double().eval()
    own = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    theirs = dict(gpt2.named_parameters())
    for name, value in converted(own):
        with torch.no_grad():
            theirs.pop(name).copy_(value)
    assert not theirs

    x = torch.randn(2, LENGTH, 64, dtype=torch.float64)
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = block(ours_x, model.make_context(torch.zeros(2, LENGTH, dtype=torch.int64)))
    want = gpt2(theirs_x, attention_mask=mask)
    want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(got, want, atol=EXACT, rtol=0)
    direction = torch.randn_like(got)
    got.backward(direction)
    want.backward(direction)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, atol=EXACT, rtol=0)
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    wanted = dict(gpt2.named_parameters())
    for name, gradient in converted(gradients):
        torch.testing.assert_close(gradient, wanted[name].grad, atol=EXACT, rtol=0)
