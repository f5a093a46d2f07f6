"""The Stage II loss against its definition in float64: gradients, metrics, what it teaches."""

import math

import pytest
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.families.ouro.objective import AdaptiveGateLoss, adaptive_loss
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead

EXACT = 1e-12
"""float64 against float64: only the order of sums differs."""
STEPS, BATCH, LENGTH, WIDTH, VOCAB = 4, 3, 5, 6, 11
SLOPE, THRESHOLD = 50.0, 0.005


def draw(steps: int = STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Gate logits, cross entropies around each other by a few γ, and labels with ignored ones."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(steps, BATCH, LENGTH, generator=generator, dtype=torch.float64) * 2
    ce = 3 + 0.02 * torch.randn(steps, BATCH, LENGTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels[torch.rand(BATCH, LENGTH, generator=generator) < 0.25] = IGNORE_INDEX
    assert (labels == IGNORE_INDEX).any()
    return logits.requires_grad_(), ce.masked_fill(labels == IGNORE_INDEX, 0.0), labels


def definition(logits: Tensor, ce: Tensor, labels: Tensor) -> Tensor:
    """The formula, term by term: steps are counted from 1 as in the paper."""
    steps = len(logits)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for b in range(labels.shape[0]):
        for position in range(labels.shape[1]):
            if labels[b, position] == IGNORE_INDEX:
                continue
            count += 1
            for r in range(2, steps + 1):
                gain = max(0.0, float(ce[r - 2, b, position] - ce[r - 1, b, position]))
                w = 1 / (1 + math.exp(-SLOPE * (gain - THRESHOLD)))
                rate = torch.sigmoid(logits[r - 1, b, position])
                total = total - (w * torch.log(1 - rate) + (1 - w) * torch.log(rate))
    return total / count / steps


@pytest.mark.parametrize("steps", [2, 4])
def test_loss_and_gradient_equal_the_definition(steps: int):
    logits, ce, labels = draw(steps)
    valid = (labels != IGNORE_INDEX).sum()
    settings = {"slope": SLOPE, "threshold": THRESHOLD, "valid_tokens": valid}
    got = adaptive_loss(logits, ce, labels, **settings).loss
    want = definition(logits, ce, labels)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    (got_gradient,) = torch.autograd.grad(got, logits)
    (want_gradient,) = torch.autograd.grad(want, logits)
    torch.testing.assert_close(got_gradient, want_gradient, rtol=EXACT, atol=EXACT)
    taught = [r for r in range(steps) if got_gradient[r].any()]
    assert taught == list(range(1, steps))
    assert not got_gradient[:, labels == IGNORE_INDEX].any()


def test_the_loss_class_reads_cross_entropies_out_of_the_head():
    torch.manual_seed(0)
    head = LMHead.Config(in_features=WIDTH, out_features=VOCAB, chunk_tokens=7).build().double()
    head.requires_grad_(False)
    logits, _, labels = draw()
    states = torch.randn(STEPS, BATCH, LENGTH, WIDTH, dtype=torch.float64)
    pred = LoopOutput(tuple(states), tuple(logits))
    ce = torch.stack(
        [
            torch.nn.functional.cross_entropy(
                (hidden @ head.weight.T).flatten(0, 1), labels.flatten(), reduction="none"
            ).view(labels.shape)
            for hidden in pred.hidden_RBLD
        ]
    )
    valid = labels != IGNORE_INDEX
    loss_fn = AdaptiveGateLoss.Config().build()
    loss_fn.set_lm_head(head)
    loss, metrics = loss_fn(pred, labels, valid.sum())
    want = definition(logits, ce, labels)
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-10)

    steps = range(1, STEPS + 1)
    assert list(metrics) == [
        *(f"ce/step_{r}" for r in steps),
        *(f"exit/pmf_{r}" for r in steps),
        "exit/entropy_nats",
        "exit/mean_step",
        *(f"improvement/step_{r}" for r in steps[1:]),
        *(f"gate/target_{r}" for r in steps[1:]),
        *(f"gate/bce_{r}" for r in steps[1:]),
    ]
    assert not any(value.requires_grad or value.ndim for value in metrics.values())
    for r in steps[1:]:
        gain = (ce[r - 2] - ce[r - 1]).clamp(min=0)[valid]
        assert metrics[f"improvement/step_{r}"].item() == pytest.approx(gain.mean().item())
        target = torch.sigmoid(SLOPE * (gain - THRESHOLD)).mean()
        assert metrics[f"gate/target_{r}"].item() == pytest.approx(target.item())
    bce = sum(metrics[f"gate/bce_{r}"].item() for r in steps[1:])
    assert bce / STEPS == pytest.approx(loss.item())


def test_a_gate_that_collapses_onto_one_step_is_warned_of():
    metrics = {"exit/pmf_1": 0.995, "exit/pmf_2": 0.005, "exit/entropy_nats": 0.03}
    warning = AdaptiveGateLoss.Config().build().warning(metrics)
    assert warning is not None
    assert "step 1 of 2 takes 99.50% of the exits; see in improvement/step_r" in warning
    even = {"exit/pmf_1": 0.5, "exit/pmf_2": 0.5, "exit/entropy_nats": math.log(2)}
    assert AdaptiveGateLoss.Config().build().warning(even) is None
