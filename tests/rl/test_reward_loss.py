"""The objective's gradient against the expected reward, and against plain log-probabilities."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.inference.reference import Reference, make_model
from titan_loop.models.replay import EXIT_STEP
from titan_loop.objectives.exit_distribution import exit_pmf
from titan_loop.objectives.streamed_loss import LossBatch
from titan_loop.rl.reward_loss import (
    ADVANTAGE,
    ENGINE_LOG_PROB,
    OLD_EXIT_LOG_PROB,
    OLD_LOG_PROB,
    PARENT_LOG_PROB,
    READ_STEP,
    WEIGHT,
    RewardLoss,
    written_log_probs,
)

UNREAD = (ENGINE_LOG_PROB, OLD_LOG_PROB, OLD_EXIT_LOG_PROB)
STEPS, VOCABULARY, PROMPT = 3, 3, [2, 0, 1]


def tiny():
    return make_model(vocab_size=VOCABULARY).double()


def reward(tokens: tuple[int, int], exits: tuple[int, int]) -> float:
    """Return a reward that depends on everything that was chosen."""
    return (tokens == (1, 2)) + 0.3 * tokens[0] - 0.1 * exits[0] - 0.25 * exits[1] * tokens[1]


def exit_probabilities(reference: Reference, states: list[torch.Tensor]) -> Iterator[float]:
    """Yield p_r of λ_r = sigmoid(gate), the last step taking the rest."""
    left = 1.0
    for state in states[:-1]:
        leaves = float(torch.sigmoid(torch.tensor(reference.gate(state), dtype=torch.float64)))
        yield left * leaves
        left *= 1 - leaves
    yield left


def trajectories(model) -> Iterator[tuple[tuple[int, int], tuple[int, int], float]]:
    """Yield tokens, exits and probability of every answer of two tokens, by the slow decoder."""
    reference = Reference(model, "full", STEPS)
    states = reference.prompt(PROMPT)
    first = zip(states, exit_probabilities(reference, states), strict=True)
    for exit_1, (state, p_exit) in enumerate(first, start=1):
        p_tokens = reference.logits(state).softmax(-1).tolist()
        for token_1 in range(VOCABULARY):
            once = Reference(model, "full", STEPS)
            once.prompt(PROMPT)
            after = once.token(token_1, STEPS)
            for exit_2, p_exit_2 in enumerate(exit_probabilities(once, after), start=1):
                p_second = once.logits(after[exit_2 - 1]).softmax(-1).tolist()
                for token_2 in range(VOCABULARY):
                    p = p_exit * p_tokens[token_1] * p_exit_2 * p_second[token_2]
                    yield (token_1, token_2), (exit_1, exit_2), p


def expected_reward(model) -> float:
    return sum(p * reward(tokens, exits) for tokens, exits, p in trajectories(model))


def test_the_gradient_with_plain_rewards_is_that_of_the_expected_reward():
    model = tiny()
    cases = [*trajectories(model)]
    assert sum(p for *_, p in cases) == pytest.approx(1.0, abs=1e-9)
    assert len(cases) == (STEPS * VOCABULARY) ** 2
    inputs = torch.tensor([[*PROMPT, tokens[0]] for tokens, *_ in cases])
    labels = torch.full_like(inputs, -100)
    exits, read = torch.full_like(inputs, STEPS), torch.zeros_like(inputs)
    weight, advantage = torch.zeros(inputs.shape).double(), torch.zeros(inputs.shape).double()
    for row, (tokens, steps, p) in enumerate(cases):
        labels[row, 2:] = torch.tensor(tokens)
        exits[row, 3], read[row, 2:] = steps[1], torch.tensor(steps)
        weight[row, 2:], advantage[row, 2:] = p, reward(tokens, steps)
    columns = {READ_STEP: read, WEIGHT: weight, ADVANTAGE: advantage}
    columns |= {name: torch.zeros_like(weight) * torch.nan for name in UNREAD}
    output = model(inputs, recurrent_steps=STEPS, columns={EXIT_STEP: exits})
    objective = RewardLoss(RewardLoss.Config(exit_action=True))
    loss, metrics = objective.compute(model.lm_head, output, LossBatch(labels, 1.0, columns))
    loss.backward()
    assert loss.item() == pytest.approx(-2 * expected_reward(model))  # two tokens an answer
    assert metrics["rl/exit_step"].item() == read.sum().item()
    size = 1e-5
    for parameter, place in [
        (model.exit_gate.bias, (0,)),
        (model.exit_gate.weight, (0, 5)),
        (model.lm_head.weight, (1, 3)),
        (model.tok_embeddings.weight, (2, 1)),
        (model.layers["0"].attention.qkv_linear.wq.weight, (3, 4)),
    ]:
        found = -parameter.grad[place].item()
        moved = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * size
                moved.append(expected_reward(model))
                parameter[place] -= sign * size
        assert found == pytest.approx((moved[0] - moved[1]) / (2 * size), rel=2e-5, abs=1e-8)


@pytest.mark.parametrize("kind", ["uniform", "progressive", "pmf"])
def test_rltt_weighs_the_log_probabilities_of_all_steps(kind):
    model = tiny()
    inputs, labels = torch.tensor([[2, 0, 1, 1]]), torch.tensor([[-100, -100, 1, 2]])
    advantage = torch.tensor([[0.0, 0.0, 1.5, -0.5]]).double()
    columns = {READ_STEP: torch.full_like(inputs, STEPS), ADVANTAGE: advantage}
    columns |= {name: torch.full_like(advantage, torch.nan) for name in UNREAD}
    columns[WEIGHT] = torch.full_like(advantage, 0.5)
    output = model(inputs, recurrent_steps=STEPS)
    objective = RewardLoss(RewardLoss.Config(trajectory=kind))
    objective.compute(model.lm_head, output, LossBatch(labels, 1.0, columns))[0].backward()
    found = {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    output = model(inputs, recurrent_steps=STEPS)
    omega = {
        "uniform": torch.full((STEPS, 1, 1), 1 / STEPS).double(),
        "progressive": torch.tensor([1.0, 2.0, 3.0]).double().view(-1, 1, 1) / 6,
        "pmf": exit_pmf(torch.stack(output.exit_logit_RBL)).detach(),
    }[kind]
    log_prob = torch.stack(
        [
            -F.cross_entropy(model.readout(h)[0], labels[0], reduction="none")
            for h in output.hidden_RBLD
        ]
    )
    (-(0.5 * advantage[0] * (omega[:, 0] * log_prob).sum(0)).sum()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "exit_gate" not in name:
            torch.testing.assert_close(found[name], parameter.grad, msg=name)
    read = columns[READ_STEP]
    columns[PARENT_LOG_PROB] = written_log_probs(model.lm_head, output, labels, read)[0]
    objective = RewardLoss(RewardLoss.Config(trajectory=kind, kl_weight=0.1))
    _, metrics = objective.compute(model.lm_head, output, LossBatch(labels, 1.0, columns))
    assert metrics["rl/kl_nats"].item() == pytest.approx(0.0, abs=1e-12)  # its own parent


@pytest.mark.parametrize("kind", ["uniform", "progressive"])
def test_the_weights_of_rltt_are_on_the_device_of_the_log_probabilities(kind):
    log_prob = torch.zeros(STEPS, 1, 2, device="meta")
    assert RewardLoss(RewardLoss.Config(trajectory=kind))._omega(log_prob, None).is_meta
