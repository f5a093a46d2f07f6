"""What flows from one recurrent step to the next, in a family with a carry of its own."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.models.ponder import PonderDecoder, ponder_input, ponder_model
from tests.models.reference import gradients_of, reference_forward
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config

SEQ_LEN, STEPS = 16, 4
ROTATION = 2e-5  # the rotary table is fp32: 1e-7 relative, amplified by 8 layers
EXACT = 1e-11  # float64, another order of sums


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(128, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)
    return tokens, positions


def test_every_step_starts_from_what_the_equations_say():
    model, (tokens, positions) = ponder_model(max_seq_len=SEQ_LEN), batch()
    output = model(tokens, positions, recurrent_steps=STEPS)
    states, logits = reference_forward(model, tokens, positions, STEPS, ponder_input)
    found = output.hidden_RBLD + output.exit_logit_RBL
    torch.testing.assert_close(found, states + logits, atol=ROTATION, rtol=0)


def gradients(model: PonderDecoder, states: list[Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    sum(model.readout(state).logsumexp(-1).sum() for state in states).backward()
    return gradients_of(model)


@pytest.mark.parametrize("backward_steps", [None, 1, 2])
def test_truncated_and_recomputed_steps_keep_the_carry(backward_steps):
    model, (tokens, positions) = ponder_model(max_seq_len=SEQ_LEN), batch()
    constant = STEPS - (backward_steps or STEPS)  # steps whose results are constants
    context = model.make_context(tokens, positions)
    carry, states = model.start(tokens, context), []
    for step in range(1, STEPS + 1):
        if step > 1:
            carry = model.advance(carry, states[-1], step - 1, context)
        if 1 < step <= constant:
            carry = tree_map(Tensor.detach, carry)
        states.append(model.step(carry, step, context))
        if step <= constant:
            states[-1] = states[-1].detach()
    want = gradients(model, states)

    depth = {"recurrent_steps": STEPS, "backward_steps": backward_steps}
    for recomputed in (False, True):
        if recomputed:
            RecurrentStepAC.Config(layers="full").build().apply(model)
        got = gradients(model, list(model(tokens, positions, **depth).hidden_RBLD))
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_named_columns_reach_the_start_and_every_step():
    seen = []

    class Typed(PonderDecoder):
        def start(self, tokens, context):
            carry = super().start(tokens, context)
            return carry._replace(sum_BLD=carry.sum_BLD + context.columns["kind"].unsqueeze(-1))

        def advance(self, carry, hidden_BLD, step, context):
            seen.append((step, context.columns["kind"]))
            return super().advance(carry, hidden_BLD, step, context)

    torch.manual_seed(0)
    model = Typed(decoder_config(OuroOptions(), max_seq_len=SEQ_LEN))
    with torch.no_grad():
        model.init_states()
    tokens, positions = batch()
    kind = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    output = model(tokens, positions, columns={"kind": kind})
    assert [step for step, _ in seen] == [1, 2]
    assert all(column is kind for _, column in seen)
    zero = model(tokens, positions, columns={"kind": kind * 0})
    assert not torch.equal(output.hidden_RBLD[0][:, 1], zero.hidden_RBLD[0][:, 1])
