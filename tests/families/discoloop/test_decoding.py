"""DiscoLoop and PonderLM against their equations, their inference, and what they refuse."""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.contracts.families import random_model
from tests.families.discoloop.contract import MODELS
from tests.inference.reference import CONTEXT
from tests.models.reference import Weights, reference_forward
from titan_loop.families.discoloop.model import DecodingOptions, DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions
from titan_loop.models.family import decoder_config

ROTATION = 2e-5  # the rotary table is fp32: 1e-7 relative, amplified by 8 layers
SCALE = 8.0  # the square root of 64, the width
STEPS = 4


def decoded(options: DecodingOptions, weights: Weights, state: Tensor) -> Tensor:
    head = weights["tok_embeddings.weight" if options.tie_weights else "lm_head.weight"]
    logits = state @ head.T / options.temperature
    kept = options.top_k or logits.shape[-1]
    smallest = logits.sort(-1).values[..., -kept, None]
    odds = torch.where(logits >= smallest, (logits - logits.amax(-1, keepdim=True)).exp(), 0.0)
    return odds / odds.sum(-1, keepdim=True) @ weights["tok_embeddings.weight"]


def following(options: DecodingOptions, weights: Weights, embedding: Tensor, states: list[Tensor]):
    """Return what the step after `states` starts from."""
    if isinstance(options, PonderOptions):
        scale = SCALE if options.scale_embeddings else 1.0
        return embedding + scale * sum(decoded(options, weights, state) for state in states)
    assert isinstance(options, DiscoLoopOptions)
    mean = decoded(options, weights, states[-1])
    normed = mean / (mean.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    strength = options.channel_strength
    if options.channel_gate == "learned":
        strength = 1 / (1 + (-mean @ weights["channel.weight"] - weights["channel.bias"]).exp())
        strength = strength.unsqueeze(-1)
    return states[-1] + strength * normed * weights["channel.norm.weight"]


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_step_starts_from_what_the_equations_say(name):
    options, (tokens, positions) = MODELS[name], batch()
    model = random_model(options, CONTEXT)
    output = model(tokens, positions, recurrent_steps=STEPS)
    factor = options.start_factor * SCALE if name == "ponder-published" else 1.0
    read, logits = reference_forward(
        model, tokens, positions, STEPS, functools.partial(following, options), start_factor=factor
    )
    found = output.hidden_RBLD + output.exit_logit_RBL
    torch.testing.assert_close(found, read + logits, atol=ROTATION, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [1, 3])
def test_flops_are_those_counted(name, steps):
    options = MODELS[name]
    config = decoder_config(options, max_seq_len=CONTEXT)
    with FlopCounterMode(display=False) as counter:  # does not know attention on a CPU
        random_model(options, CONTEXT)(torch.zeros(1, 16, dtype=torch.int64), recurrent_steps=steps)
    flops = config.training_flops(16, steps)
    forward, backward = config.decoding.training_flops(64, 128)
    assert flops.decoding == (steps - 1) * (forward + backward)
    wanted = (flops.matrices + flops.gate) / 3 + (steps - 1) * forward
    assert counter.get_total_flops() == 16 * wanted
    assert config.training_flops(16, 4, backward_steps=2).decoding == 3 * forward + 2 * backward
