"""Blocks are the equations of the module's docstring, and count their own weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.models.block import DenseBlock
from titan_loop.models.dense import DenseOptions
from titan_loop.models.dropout import Dropout
from titan_loop.models.family import build_decoder

LENGTH = 8
FOUR = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")


def block_of(options: Any, **changed: Any) -> tuple[DenseBlock, Any]:
    """Return a layer off its start, in float64, and a context of two windows."""
    torch.manual_seed(0)
    model = build_decoder(options, max_seq_len=LENGTH).double()
    layer = replace(model.config.layers[0], **changed).build().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return layer, model.make_context(torch.zeros(2, LENGTH, dtype=torch.int64))


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("rate", [None, 0.3])
@pytest.mark.parametrize(
    ("options", "norms"),
    [
        (XllmOptions(), ("attention_norm", "ffn_norm")),
        (OuroOptions(size="debugmodel"), FOUR),
        (DenseOptions(norm_order="after"), FOUR[1::2]),
    ],
)
def test_a_layer_is_its_two_equations(options, norms, rate, scale):
    dropout = None if rate is None else Dropout.Config(rate=rate)
    layer, context = block_of(options, dropout=dropout, branch_scale=scale)
    x = start = torch.randn(2, LENGTH, 64, dtype=torch.float64)
    torch.manual_seed(3)
    got = layer.train()(start, context)
    torch.manual_seed(3)

    def kept(branch: torch.Tensor) -> torch.Tensor:
        mask = 1.0 if rate is None else (torch.rand(x.shape) >= rate).double() / (1 - rate)
        return scale * mask * branch

    def normed(name: str, value: torch.Tensor) -> torch.Tensor:
        return getattr(layer, name)(value) if name in norms else value

    attended = layer.attention(normed("attention_norm", x), context)
    x = x + kept(normed("attention_post_norm", attended))
    fed = normed("ffn_post_norm", layer.feed_forward(normed("ffn_norm", x)))
    torch.testing.assert_close(got, x + kept(fed), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "norms"),
    [(XllmOptions(), 2), (OuroOptions(size="debugmodel"), 4), (HrmTextOptions(), None)],
)
def test_a_layer_counts_its_matrices_and_norms(options, norms):
    config = build_decoder(options, max_seq_len=LENGTH, device="meta").config.layers[0]
    with torch.device("meta"):
        layer = config.build()

    def matrices(part: torch.nn.Module) -> int:
        return sum(p.numel() for p in part.parameters() if p.ndim == 2)

    assert config.matrix_elements == matrices(layer)
    assert config.attention_elements == matrices(layer.attention)
    if norms is not None:
        named = [name for name, _ in layer.named_children() if "norm" in name]
        assert len(config.norms) == norms == len(named)
    assert (config.dropout, config.branch_scale) == (None, 1.0)
