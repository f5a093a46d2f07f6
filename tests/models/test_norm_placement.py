"""A final norm at the readout only: what flows between steps is not normed, what is read is."""

import pytest
import torch

from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT, prompts
from tests.models.reference import reference_forward
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_decider import exit_steps
from titan_loop.inference.exit_policy import ExitPolicy, HiddenDifference, QExit
from titan_loop.inference.rows import Request
from titan_loop.models.family import build_decoder

ROTATION = 2e-5  # the rotary table is fp32: 1e-7 relative, amplified by 8 layers
STEPS = 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_decoder(OuroOptions(norm_placement="readout"), max_seq_len=CONTEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def batch():
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)


def test_forward_agrees_with_the_float64_reference(model):
    tokens, positions = batch()
    output = model(tokens, positions, recurrent_steps=STEPS)
    read, logits = reference_forward(model, tokens, positions, STEPS, norm_at_readout=True)
    for got, want in zip(output.hidden_RBLD + output.exit_logit_RBL, read + logits, strict=True):
        torch.testing.assert_close(got, want, atol=ROTATION, rtol=0)


def test_the_norm_has_the_gradient_of_all_readouts_also_of_constant_steps(model):
    """Truncated at the last step, the norm still trains on every state that is read."""
    tokens, positions = batch()
    model.zero_grad()
    model.recurrence.backward_steps = 1
    RecurrentStepAC.Config().build().apply(model)
    try:
        output = model(tokens, positions, recurrent_steps=STEPS)
        for state in output.hidden_RBLD:
            state.square().sum().backward(retain_graph=True)
    finally:
        model.recurrence.backward_steps = None
        model.recurrence.wrap = None
    got = model.norm.weight.grad.clone()
    # Of ‖w ⊙ n‖² the gradient is 2 w ⊙ n²: with n = read / w a sum over states and tokens.
    weight = model.norm.weight.detach()
    want = sum(2 * (s.detach() / weight).square().sum((0, 1)) * weight for s in output.hidden_RBLD)
    torch.testing.assert_close(got, want)


def test_generation_equals_the_full_forward(model):
    check_generation(model, steps=STEPS)


class Normed(ExitPolicy):
    """Never fires, and looks whether what it sees went through the norm."""

    name = "static"

    def __init__(self, weight):
        self.weight, self.seen = weight, 0

    def fires(self, evidence):
        for state in (evidence.hidden_BLD, evidence.before_BLD):
            assert torch.allclose((state / self.weight).square().mean(-1), torch.ones(1).double())
            self.seen += 1
        return torch.zeros_like(evidence.step_BL, dtype=torch.bool)


@torch.no_grad()
def test_exit_policies_read_normed_states(model):
    requests = [Request(prompt=prompt, max_new_tokens=8) for prompt in prompts(5, 2, 7)]
    for policy in (HiddenDifference(2.5), QExit(0.7)):
        got = Engine(model, recurrent_steps=STEPS, exit_policy=policy).complete(requests)
        for request, completion in zip(requests, got, strict=True):
            states = model(torch.tensor([request.prompt]), recurrent_steps=STEPS).hidden_RBLD
            steps = exit_steps(policy, states, gate=model.gate, readout=model.readout)
            assert completion.steps[0] == int(steps[0, -1])
        assert len({step for completion in got for step in completion.steps}) > 1
    policy = Normed(model.norm.weight)
    got = Engine(model, recurrent_steps=STEPS, exit_policy=policy).complete(requests)
    assert got == Engine(model, recurrent_steps=STEPS).complete(requests)
    assert policy.seen == 2 * STEPS * 8
