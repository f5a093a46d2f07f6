"""Joined matrices give the outputs and gradients of separate ones, in fewer products."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.dense_blocks import BLOCKS
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder

SHAPE: dict[str, Any] = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def gradients(options: DenseOptions, *, join: bool, backward_steps: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = build_decoder(options, max_seq_len=16).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if join:
        model.joined_layers = (0, 1, 2)
        assert all(layer.can_join for layer in model.layers.values())
    tokens = torch.arange(24).view(2, 12)
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, 12)
    output = model(tokens, positions, recurrent_steps=3, backward_steps=backward_steps)
    logits = model.lm_head(torch.stack(output.hidden_RBLD))
    logits.cos().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("backward_steps", [None, 2])
@pytest.mark.parametrize("block", BLOCKS)
def test_outputs_and_gradients_are_those_of_separate_matrices(block, backward_steps):
    options = DenseOptions(**SHAPE, vocab_size=40, **BLOCKS[block])
    apart, joined = (
        gradients(options, join=join, backward_steps=backward_steps) for join in (False, True)
    )
    torch.testing.assert_close(joined, apart, rtol=1e-9, atol=1e-12)


def test_a_visit_is_four_products_and_a_pass_joins_once():
    options = DenseOptions(**SHAPE, vocab_size=40)
    model = build_decoder(options, max_seq_len=16)
    model.joined_layers = (0, 1, 2)
    tokens = torch.arange(24).view(2, 12)
    with Products() as once:
        model(tokens, recurrent_steps=1)
    with Products() as thrice:
        model(tokens, recurrent_steps=3)
    assert (once.calls["aten::mm"], thrice.calls["aten::mm"]) == (3 * 4, 3 * 3 * 4)
    assert thrice.calls["aten::cat"] == once.calls["aten::cat"] == 3 * 2
