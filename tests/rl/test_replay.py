"""The training pass over written answers against the engine that wrote them."""

import pytest
import torch

from tests.inference.reference import make_model, perturbed
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import parse_exit_policy
from titan_loop.inference.measures import log_probabilities
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder
from titan_loop.models.replay import EXIT_STEP

STEPS = 4
POLICIES = ("full", "static:2", "q:0.6", "sampled", "hidden:3", "confidence:0.05", "margin:0.4")
EXACT = 1e-5  # two ways of summing in fp32


def dense(**options):
    torch.manual_seed(0)
    shape = {"dim": 64, "n_heads": 4, "hidden_dim": 96, "vocab_size": 128, "recurrent_steps": STEPS}
    return perturbed(
        build_decoder(DenseOptions(**shape, exit_gate=True, **options), max_seq_len=64)
    )


MODELS = {
    "ouro": make_model,
    "prelude": lambda: dense(n_layers=3, prelude_layers=1),
    "window": lambda: dense(n_layers=2, window=5, windowed_layers=(0,), n_kv_heads=2),
}


def replayed(model, prompt, answer):
    """Return log π of the answer's tokens, and the log pmf of their exits, by one training pass."""
    tokens = torch.tensor([[*prompt, *answer.tokens]])[:, :-1]
    begin = len(prompt) - 1
    exits = torch.full_like(tokens, STEPS)
    exits[0, len(prompt) :] = torch.tensor(answer.steps[1:])
    output = model(tokens, recurrent_steps=STEPS, columns={EXIT_STEP: exits})
    found = []
    for place, (token, step) in enumerate(zip(answer.tokens, answer.steps, strict=True)):
        state_BLD = output.hidden_RBLD[step - 1][:, begin + place : begin + place + 1]
        found.append(log_probabilities(model.readout(state_BLD))[0, 0, token])
    return torch.stack(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_the_training_pass_computes_the_engines_log_probabilities(name, policy):
    model = MODELS[name]()
    engine = Engine(model, recurrent_steps=STEPS, exit_policy=parse_exit_policy(policy))
    prompts = [[5, 9, 100, 33], [7, 70], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    requests = [Request(prompt=p, max_new_tokens=12, log_probs=True, seed=3) for p in prompts]
    answers = engine.complete(requests, sampling=Sampling(temperature=1.0))
    steps = {step for answer in answers for step in answer.steps}
    assert len(steps) > 1 or policy in ("full", "static:2"), steps
    for prompt, answer in zip(prompts, answers, strict=True):
        told = torch.tensor(answer.log_probs)
        torch.testing.assert_close(replayed(model, prompt, answer), told, atol=EXACT, rtol=0)


@torch.no_grad()
def test_without_the_exits_the_pass_computes_something_else():
    model = make_model()
    engine = Engine(model, recurrent_steps=STEPS, exit_policy=parse_exit_policy("sampled"))
    asked = Request(prompt=[5, 9, 100, 33], max_new_tokens=12, log_probs=True, seed=3)
    (answer,) = engine.complete([asked], sampling=Sampling(temperature=1.0))
    told = torch.tensor(answer.log_probs)
    answer_at_full_depth = replayed(model, asked.prompt, answer)
    torch.testing.assert_close(answer_at_full_depth, told, atol=EXACT, rtol=0)
    answer.steps[1:] = [STEPS] * (len(answer.steps) - 1)
    assert (replayed(model, asked.prompt, answer) - told).abs().max() > 100 * EXACT
