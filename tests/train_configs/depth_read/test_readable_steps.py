"""Stage I's options against their definition in float64, token by token with all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from tests.objectives.test_expected_loss import (
    EXACT,
    STEPS,
    build_head,
    draw_batch,
    parameters,
    valid_tokens,
)
from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from train_configs.depth_read.readable_steps import ReadableStepsLoss

BETA = 0.1
_EARLY = [1 / r**2 for r in range(1, STEPS)]
CONSTANT = {
    "even": [1 / STEPS] * STEPS,
    "first": [*(x / sum(_EARLY) * (1 - 1 / STEPS) for x in _EARLY), 1 / STEPS],
}


def build(head: LMHead, *, every_step: float = 1.0, **options: Any):
    loss_fn = ReadableStepsLoss.Config(**options).build()
    loss_fn.set_lm_head(head)
    loss_fn.set_schedules({"entropy_weight": BETA, "every_step": every_step})
    return loss_fn


def definition(
    pred: LoopOutput,
    head_weight: Tensor,
    labels: Tensor,
    *,
    every_step: float,
    weights: str = "gate",
    distillation: float = 0.0,
) -> Tensor:
    total, last = torch.zeros((), dtype=torch.float64), pred.hidden_RBLD[-1]
    places = [tuple(place) for place in (labels != IGNORE_INDEX).nonzero().tolist()]
    for b, i in places:
        survival = torch.ones((), dtype=torch.float64)
        log_q = F.log_softmax(head_weight @ last[b, i], dim=0).detach()
        for r in range(STEPS):
            rate = torch.sigmoid(pred.exit_logit_RBL[r][b, i])
            p = survival * rate if r < STEPS - 1 else survival
            survival = survival * (1 - rate)
            constant = CONSTANT[weights][r] if weights != "gate" else 0.0
            weight = p if weights == "gate" else torch.tensor(constant, dtype=torch.float64)
            log_p = F.log_softmax(head_weight @ pred.hidden_RBLD[r][b, i], dim=0)
            ce = -log_p[labels[b, i]]
            if r == STEPS - 1:
                total = total + (1 - every_step) * ce + every_step * weight * ce
            else:
                kl = (log_q.exp() * (log_q - log_p)).sum()
                mixed = (1 - distillation) * ce + distillation * kl
                if distillation:  # the gate compares cross entropies, whatever the states learn
                    seen = weight * ce.detach() - (weight * ce).detach()
                    mixed = weight.detach() * mixed + seen
                else:
                    mixed = weight * mixed
                total = total + every_step * mixed
            if weights == "gate":
                total = total + every_step * BETA * p * p.log()
    return total / len(places)


@pytest.mark.parametrize(
    "options",
    [
        {"every_step": 0.3},
        {"every_step": 0.3, "weights": "even"},
        {"every_step": 0.7, "distillation": 1.0},
        {"every_step": 0.6, "weights": "first", "distillation": 0.5},
        {"every_step": 1.0, "distillation": 0.4},
        {"every_step": 0.5, "distillation": 0.4, "weights": "even"},
        {"every_step": 0.0},
    ],
)
def test_loss_and_every_gradient_equal_the_definition(options: dict[str, Any]):
    head = build_head()
    pred, labels = draw_batch()
    loss, _ = build(head, **options)(pred, labels, valid_tokens(labels))
    want = definition(pred, head.weight, labels, **options)
    torch.testing.assert_close(loss, want, rtol=EXACT, atol=EXACT)
    inputs = parameters(pred, head)
    got = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(want, inputs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


def test_the_defaults_are_stage_one_bit_for_bit():
    head = build_head()
    pred, labels = draw_batch()
    plain = ExpectedExitLoss.Config().build()
    plain.set_lm_head(head)
    plain.set_schedules({"entropy_weight": BETA})
    want, want_metrics = plain(pred, labels, valid_tokens(labels))
    loss, metrics = build(head)(pred, labels, valid_tokens(labels))
    assert torch.equal(loss, want)
    assert metrics == want_metrics
    inputs = parameters(pred, head)
    one, other = (torch.autograd.grad(each, inputs) for each in (loss, want))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
