"""The first state: zeros, the prelude's output, or noise that an evaluation repeats."""

import math

import pytest
import torch

from titan_loop.families.xllm.start_state import StartState, fixed_noise

B, L, D = 2, 3, 8
PRELUDE = torch.arange(float(B * L * D)).reshape(B, L, D)
POSITIONS = torch.tensor([[0, 1, 2], [0, 0, 5]])


def start(kind: str, *, training: bool = False) -> torch.Tensor:
    state = StartState.Config(kind=kind).build().train(training)  # pyright: ignore
    return state(PRELUDE, POSITIONS)


def test_the_prelude_or_zeros():
    assert start("input") is PRELUDE
    assert start("zero").tolist() == torch.zeros(B, L, D).tolist()


def test_noise_of_an_evaluation_is_a_function_of_position_and_dimension():
    noise = start("normal")
    assert noise.shape == PRELUDE.shape
    assert torch.equal(noise, start("normal"))
    assert torch.equal(noise[0, 0], noise[1, 1])  # both are position 0
    assert not torch.equal(noise[0, 1], noise[0, 2])
    for d, p in ((0, 0), (3, 0), (0, 5), (7, 2)):
        hashed = 43758.5453123 * math.sin(0.013579 * d + 0.021713 * p + 0.123457)
        uniform = 2 * (hashed - math.floor(hashed)) - 1
        found = fixed_noise(torch.tensor([[p]]), D)[0, 0, d].item()
        assert -1 < uniform < 1
        # fp32 has seven digits, and the hash multiplies by 40,000.
        assert math.erf(found / math.sqrt(2 / D)) == pytest.approx(uniform, abs=0.02)


def test_both_kinds_of_noise_have_variance_one_over_the_width():
    """16,384 numbers: a deviation of 5 % is 9 standard errors."""
    width = 1024
    noise = fixed_noise(torch.arange(16)[None], width)
    assert noise.var().item() * width == pytest.approx(1, abs=0.05)
    torch.manual_seed(0)
    state = StartState.Config(kind="normal").build().train()
    prelude = torch.zeros(1, 16, width)
    drawn = state(prelude, torch.arange(16)[None])
    assert drawn.var().item() * width == pytest.approx(1, abs=0.05)
    assert not torch.equal(drawn, state(prelude, torch.arange(16)[None]))
