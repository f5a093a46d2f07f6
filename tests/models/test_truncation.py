"""Truncated back-propagation and recomputation by step, against a graph by hand in float64."""

import pytest
import torch
from torch import Tensor
from torchtitan.config import CompileConfig

from tests.contracts.families import random_model
from tests.models.reference import gradients_of
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.objectives.exit_distribution import exit_pmf
from titan_loop.objectives.expected_loss import ExpectedExitLoss

STEPS, SEQ_LEN, VOCABULARY = 4, 16, 128
EXACT = 1e-11  # float64, another order of sums


def build(*, tie: bool = False) -> tuple[LoopDecoder, Tensor]:
    model = random_model(OuroOptions(tie_weights=tie), SEQ_LEN)
    return model, torch.randint(VOCABULARY, (2, SEQ_LEN + 1))


def trained(
    model: LoopDecoder, tokens: Tensor, backward_steps: int | None
) -> dict[str, Tensor | None]:
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    output = model(tokens[:, :-1], recurrent_steps=STEPS, backward_steps=backward_steps)
    loss, _ = loss_fn(output, tokens[:, 1:], 1.0)
    loss.backward()
    return gradients_of(model)


def by_hand(model: LoopDecoder, tokens: Tensor, backward_steps: int) -> dict[str, Tensor | None]:
    """Steps before the last `backward_steps` are constants; the readout of every step is not."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    context = model.make_context(inputs)
    state, cross_entropies, exit_logits = model.tok_embeddings(inputs), [], []
    for step in range(1, STEPS + 1):
        state = model.step(state, step, context)
        if step <= STEPS - backward_steps:
            state = state.detach()
        log_probability = (state @ model.lm_head.weight.T).log_softmax(-1)
        cross_entropies.append(-log_probability.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
        exit_logits.append(model.gate(state))
    (exit_pmf(torch.stack(exit_logits)) * torch.stack(cross_entropies)).sum().backward()
    return gradients_of(model)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("backward_steps", [1, 2, 3, 4, 9])
def test_the_backward_pass_reaches_the_last_steps_only(backward_steps, tie):
    model, tokens = build(tie=tie)
    want = by_hand(model, tokens, backward_steps)
    model, tokens = build(tie=tie)
    got = trained(model, tokens, backward_steps)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    embedding = {"tok_embeddings.weight"} if backward_steps < STEPS and not tie else set()
    assert {name for name, gradient in want.items() if gradient is None} == embedding


@pytest.mark.parametrize("layers", ["none", "full"])
@pytest.mark.parametrize("backward_steps", [None, 2])
def test_recomputing_steps_changes_no_bit(layers, backward_steps):
    plain, tokens = build()
    want = trained(plain, tokens, backward_steps)
    model, _ = build()
    RecurrentStepAC.Config(layers=layers).build().apply(model)
    runs = []
    for index, layer in enumerate(model.layers.values()):
        layer.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    got = trained(model, tokens, backward_steps)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    recomputed = backward_steps or STEPS
    assert runs.count(0) == STEPS + recomputed, "every recorded step runs once more"
