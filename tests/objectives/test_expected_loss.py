"""The Stage I loss against its definition in float64, its metrics, and the collapse warning."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.models.output import LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.expected_loss import ExpectedExitLoss, collapse_warning

EXACT = 1e-10
"""float64 against float64: only the order of sums differs."""
STEPS, BATCH, LENGTH, WIDTH, VOCAB = 3, 4, 8, 6, 11
ENTROPY_WEIGHT = 0.1


def build_loss(
    head: LMHead, config: ExpectedExitLoss.Config | None = None, entropy_weight: float = 0.1
) -> ExpectedExitLoss:
    loss_fn = (config or ExpectedExitLoss.Config()).build()
    assert isinstance(loss_fn, ExpectedExitLoss)
    loss_fn.set_lm_head(head)
    loss_fn.entropy_weight = entropy_weight
    return loss_fn


def build_head() -> LMHead:
    torch.manual_seed(0)
    return LMHead.Config(in_features=WIDTH, out_features=VOCAB, chunk_tokens=7).build().double()


def draw_batch(steps: int = STEPS) -> tuple[LoopOutput, Tensor]:
    """A model output in float64 and labels, a quarter of them ignored."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden = tuple(normal(BATCH, LENGTH, WIDTH) for _ in range(steps))
    gate = tuple(normal(BATCH, LENGTH) for _ in range(steps))
    labels = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels[torch.rand(BATCH, LENGTH, generator=generator) < 0.25] = IGNORE_INDEX
    return LoopOutput(hidden, gate), labels


def definition(
    pred: LoopOutput,
    head_weight: Tensor,
    labels: Tensor,
    entropy_weight: float,
    eta: float | None = None,
) -> Tensor:
    """Σ_r p_r CE_r − β H(p), or + β (KL(p ‖ π) − log R), token by token with all logits."""
    steps = len(pred.hidden_RBLD)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for b in range(labels.shape[0]):
        for position in range(labels.shape[1]):
            label = labels[b, position]
            if label == IGNORE_INDEX:
                continue
            count += 1
            survival = torch.ones((), dtype=torch.float64)
            for r in range(steps):
                rate = torch.sigmoid(pred.exit_logit_RBL[r][b, position])
                p = survival * rate if r < steps - 1 else survival
                survival = survival * (1 - rate)
                logits = head_weight @ pred.hidden_RBLD[r][b, position]
                ce = -F.log_softmax(logits, dim=0)[label]
                prior = 1 / steps
                if eta is not None:
                    masses = [(1 - eta) ** j for j in range(steps)]
                    prior = masses[r] / sum(masses)
                total = total + p * ce + entropy_weight * p * (p.log() - math.log(steps * prior))
    return total / count


def valid_tokens(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def parameters(pred: LoopOutput, head: LMHead) -> tuple[Tensor, ...]:
    return (*pred.hidden_RBLD, *pred.exit_logit_RBL, head.weight)


@pytest.mark.parametrize("eta", [None, 0.3])
@pytest.mark.parametrize("steps", [1, 3])
def test_loss_and_every_gradient_equal_the_definition(eta: float | None, steps: int):
    config = ExpectedExitLoss.Config()
    if eta is not None:
        config = ExpectedExitLoss.Config(prior="geometric", geometric_eta=eta)
    head = build_head()
    pred, labels = draw_batch(steps)
    loss, _ = build_loss(head, config)(pred, labels, valid_tokens(labels))
    want = definition(pred, head.weight, labels, ENTROPY_WEIGHT, eta)
    # geometric_prior is fp32: its log is good to 1e-7.
    tolerance = EXACT if eta is None else 1e-7
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    inputs = parameters(pred, head)
    for got, expected in zip(
        torch.autograd.grad(loss, inputs),
        torch.autograd.grad(want, inputs, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_micro_batches_add_up_to_the_batch():
    head = build_head()
    pred, labels = draw_batch()
    loss_fn = build_loss(head)
    tokens = valid_tokens(labels)
    whole, whole_metrics = loss_fn(pred, labels, tokens)
    inputs = parameters(pred, head)
    want = torch.autograd.grad(whole, inputs)

    total = torch.zeros((), dtype=torch.float64)
    metrics = dict.fromkeys(whole_metrics, 0.0)
    for rows in (slice(0, 1), slice(1, BATCH)):
        part = LoopOutput(
            tuple(h[rows] for h in pred.hidden_RBLD), tuple(g[rows] for g in pred.exit_logit_RBL)
        )
        loss, part_metrics = loss_fn(part, labels[rows], tokens)
        total = total + loss
        metrics = {key: value + part_metrics[key].item() for key, value in metrics.items()}
    torch.testing.assert_close(total, whole, rtol=EXACT, atol=EXACT)
    for got, expected in zip(torch.autograd.grad(total, inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)
    assert metrics == pytest.approx({k: v.item() for k, v in whole_metrics.items()})


def test_metrics_are_detached_means_over_valid_tokens():
    head = build_head()
    pred, labels = draw_batch()
    loss, metrics = build_loss(head, entropy_weight=0.25)(pred, labels, valid_tokens(labels))
    assert list(metrics) == [
        *(f"ce/step_{r}" for r in range(1, STEPS + 1)),
        *(f"exit/pmf_{r}" for r in range(1, STEPS + 1)),
        "exit/entropy_nats",
        "exit/mean_step",
    ]
    assert not any(value.requires_grad or value.ndim for value in metrics.values())
    for r, hidden in enumerate(pred.hidden_RBLD, start=1):
        want = F.cross_entropy((hidden @ head.weight.T).flatten(0, 1), labels.flatten())
        torch.testing.assert_close(metrics[f"ce/step_{r}"], want.detach(), rtol=EXACT, atol=EXACT)
    pmf = [metrics[f"exit/pmf_{r}"].item() for r in range(1, STEPS + 1)]
    assert sum(pmf) == pytest.approx(1.0)
    mean_step = sum(r * p for r, p in enumerate(pmf, start=1))
    assert metrics["exit/mean_step"].item() == pytest.approx(mean_step)
    # The loss falls linearly in β, with the mean entropy as its slope.
    without, _ = build_loss(head, entropy_weight=0.0)(pred, labels, valid_tokens(labels))
    slope = (without - loss).item() / 0.25
    assert metrics["exit/entropy_nats"].item() == pytest.approx(slope)


def test_a_batch_without_a_label_has_loss_and_gradients_of_zero():
    pred, labels = draw_batch()
    head = build_head()
    nothing = torch.full_like(labels, IGNORE_INDEX)
    loss, metrics = build_loss(head)(pred, nothing, (nothing != IGNORE_INDEX).sum())
    loss.backward()
    assert loss.item() == 0
    assert {value.item() for value in metrics.values()} == {0}
    for tensor in (*pred.hidden_RBLD, *pred.exit_logit_RBL, head.weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_model_without_a_gate_gets_the_last_states_cross_entropy():
    head = build_head()
    pred, labels = draw_batch()
    pred = LoopOutput(pred.hidden_RBLD, ())
    loss, metrics = build_loss(head)(pred, labels, valid_tokens(labels))
    last = pred.hidden_RBLD[-1]
    want = F.cross_entropy((last @ head.weight.T).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, want)
    assert list(metrics) == [f"ce/step_{STEPS}"]
    torch.testing.assert_close(metrics[f"ce/step_{STEPS}"], want.detach())
    got = torch.autograd.grad(loss, (last, head.weight))
    for one, other in zip(got, torch.autograd.grad(want, (last, head.weight)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("pmf", "entropy", "found"),
    [
        ([0.25, 0.25, 0.25, 0.25], 1.386, None),
        ([0.0004, 0.0855, 0.3793, 0.5348], 0.916, None),  # Ouro's own mean distribution
        ([0.0, 0.004, 0.0, 0.996], 0.02, "recurrent step 4 of 4 takes 99.60%"),
        ([0.995, 0.005], 0.0315, "recurrent step 1 of 2 takes 99.50%"),
        ([0.5, 0.0, 0.0, 0.5], 0.001, "entropy is 0.07% of log 4"),  # per token all or nothing
        ([1.0], 0.0, None),
        ([], None, None),
    ],
)
def test_collapse_warning(pmf: list[float], entropy: float | None, found: str | None):
    metrics = {f"exit/pmf_{r}": torch.tensor(p) for r, p in enumerate(pmf, start=1)}
    if entropy is not None:
        metrics["exit/entropy_nats"] = torch.tensor(entropy)
    warning = collapse_warning(metrics)
    if found is None:
        assert warning is None
    else:
        assert warning is not None
        assert found in warning
        assert "\n" not in warning
