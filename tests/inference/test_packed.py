"""Matrices in oneDNN's layout: the numbers of plain ones, as they are when they are packed."""

from typing import Any

import torch

from tests.inference.reference import make_model
from titan_loop.inference import packed
from titan_loop.models.decoder import LoopDecoder

EXACT = 1e-5  # two ways of summing in fp32


def logits(model: LoopDecoder) -> torch.Tensor:
    """Return the logits of a few tokens after the last step."""
    return model.readout(model(torch.tensor([[5, 9, 100], [3, 1, 2]])).hidden_RBLD[-1])


@torch.no_grad()
def test_packed_models_compute_as_plain_ones(monkeypatch):
    monkeypatch.setattr(packed, "SMALLEST", 1)
    models: list[Any] = [make_model(), make_model()]
    plain, model = models
    for scale in (1.0, 1.5):
        for each in models:
            each.layers["0"].feed_forward.w1.weight.mul_(scale)
            each.lm_head.weight.mul_(scale)
        packed.pack(model)
        torch.testing.assert_close(logits(model), logits(plain), rtol=EXACT, atol=EXACT)
    assert "forward" in vars(model.lm_head)
    assert "forward" in vars(model.layers["1"].attention.wo)
    for each in models:
        each.layers["1"].attention.wo.weight.mul_(2)  # not packed again
    torch.testing.assert_close(logits(model), logits(plain), rtol=EXACT, atol=EXACT)
    with torch.enable_grad():
        logits(model).sum().backward()
    assert all(parameter.grad is not None for parameter in model.layers.parameters())
    torch.testing.assert_close(logits(model.double()), logits(plain.double()))
