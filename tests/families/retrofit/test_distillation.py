"""Distillation, streamed: against a float64 reference, and in a run."""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.configs import ParallelismConfig

from tests.families.retrofit.conftest import TOKENS, Made, Retrofit
from tests.families.retrofit.test_adapters import made
from titan_loop.families.retrofit.distillation import DistillationLoss

LABELS = TOKENS.roll(-1, 1).clone()
LABELS[0, :3] = IGNORE_INDEX
VALID = 37.0


def loss_of(model, config: DistillationLoss.Config, steps: int = 2):
    """Return loss, metrics and gradients of head and last state."""
    loss_fn = config.build()
    loss_fn.set_lm_head(model.lm_head)
    model.zero_grad()
    output = model(TOKENS, recurrent_steps=steps, collect=config.collect(exit_gate=False))
    states = output.hidden_RBLD[-1]
    states.retain_grad()
    positions = torch.arange(TOKENS.shape[1])[None]
    columns = {"input": TOKENS, "positions": positions}
    loss, metrics = loss_fn(output, LABELS, VALID, columns=columns)
    loss.backward()
    return loss.detach(), metrics, [model.lm_head.weight.grad.clone(), states.grad.clone()]


def reference(model, teacher_logits, share: float, steps: int = 2):
    """Return the same from whole logits, by autograd."""
    model.zero_grad()
    states = model(TOKENS, recurrent_steps=steps).hidden_RBLD[-1]
    states.retain_grad()
    valid = LABELS[0] != IGNORE_INDEX
    log_p = (states @ model.lm_head.weight.T).log_softmax(-1)[0][valid]
    log_q = teacher_logits.log_softmax(-1)[0][valid]
    ce = F.nll_loss(log_p, LABELS[0][valid], reduction="sum") / VALID
    kl = (log_q.exp() * (log_q - log_p)).sum() / VALID
    loss = (1 - share) * ce + share * kl
    loss.backward()
    return loss.detach(), [model.lm_head.weight.grad.clone(), states.grad.clone()]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [7, 64])
def test_the_streamed_loss_equals_whole_logits(share: float, chunk: int):
    model = made(bridge=True, readout_chunk_tokens=chunk).double()
    with torch.no_grad():
        teacher = model.readout(model(TOKENS, recurrent_steps=1).hidden_RBLD[-1])
    loss, metrics, gradients = loss_of(model, DistillationLoss.Config(share=share))
    want, want_gradients = reference(model, teacher, share)
    torch.testing.assert_close(loss, want, atol=1e-10, rtol=0)
    torch.testing.assert_close(gradients, want_gradients, atol=1e-10, rtol=0)
    total = (1 - share) * metrics["ce/step_2"] + share * metrics["distillation/kl"]
    torch.testing.assert_close(total, loss, atol=1e-12, rtol=0)


def test_a_teacher_of_its_own_run(dense: Made, retrofit: Retrofit):
    model = retrofit("tied", "--prelude", 0, "--core", 2, "--coda", 0, "--rank", 4).model
    with torch.no_grad():
        teacher = dense.model.readout(dense.model(TOKENS, recurrent_steps=1).hidden_RBLD[-1])
    config = DistillationLoss.Config(teacher=str(dense.run), share=0.5)
    loss, _, gradients = loss_of(model, config)
    want, want_gradients = reference(model, teacher, 0.5)
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients, want_gradients, atol=1e-5, rtol=1e-4)


def test_at_one_step_the_model_is_its_own_teacher():
    model = made(bridge=True).double()
    loss, metrics, (_, gradient) = loss_of(model, DistillationLoss.Config(), steps=1)
    assert float(loss) == pytest.approx(0.0, abs=1e-12)
    assert float(gradient.abs().max()) < 1e-12
    assert float(metrics["ce/step_1"]) > 1


def test_what_cannot_be_distilled_is_one_line(make_run, dense: Made):
    def complaints(**fields: object) -> list[str]:
        config = DistillationLoss.Config(**fields)  # type: ignore[arg-type]
        found = config.refusals(trainable="all", exit_gate=False, fewest_steps=1)
        return [str(refusal) for refusal in found]

    assert complaints(teacher=str(dense.run), share=1.0) == []
    assert (
        "loss.teacher=nowhere: checkpoint nowhere is not a folder"
        in complaints(teacher="nowhere")[0]
    )
    cut = ParallelismConfig(context_parallel_degree=2)
    (refusal,) = DistillationLoss.Config(teacher=str(dense.run)).parallelism_refusals(cut)
    assert "context_parallel_degree=2 cuts the windows" in str(refusal)
    assert not [*DistillationLoss.Config().parallelism_refusals(cut)]
