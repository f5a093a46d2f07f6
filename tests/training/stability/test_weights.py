"""Weight norms against float64, and what a skipped update moves."""

import torch
from torch import nn

from titan_loop.training.stability.norms import WeightNorms, parts_of

FP32_TOLERANCE = 1e-5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(5, 5), "1": nn.Linear(5, 5)})
        self.head = nn.Linear(5, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)


def test_norms_of_every_part_equal_float64():
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.head.bias.grad = None
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    gradients = {
        name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = WeightNorms(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # after it was measured
    optimizer.step()
    norms.finish()
    after = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(values: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        chosen = [v.flatten() for name, v in values.items() if name.startswith(prefix)]
        return torch.cat(chosen).norm()

    moved = {name: after[name] - before[name] for name in before}
    for part, prefix in {"0": "layers.0.", "1": "layers.1.", "head": "head."}.items():
        for got, want in (
            (norms.gradient, gradients),
            (norms.weight, before),
            (norms.update, moved),
        ):
            expected = norm(want, prefix).float()
            assert torch.allclose(got[part], expected, rtol=FP32_TOLERANCE)
    assert set(norms.update) == set(parts_of(model)) == {"0", "1", "head"}


def test_an_update_that_is_skipped_moves_nothing():
    model = Model()
    norms = WeightNorms(model)
    norms.finish()
    assert not any(norms.update.values())
    assert not any(norms.gradient.values())
