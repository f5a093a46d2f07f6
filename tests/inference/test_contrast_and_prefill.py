"""Contrast of two steps and short prefills, against a float64 decoder that knows neither."""

import math

import pytest
import torch
from torch import Tensor

from tests.inference.reference import Reference, make_model, prompts
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import (
    Contrast,
    StaticStep,
)
from titan_loop.inference.measures import contrasted
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling
from titan_loop.inference.speculative import SelfSpeculation

STRATEGIES = ("full", "last", "first", "averaged")
EXACT = 1e-12
STEPS = 3


@pytest.fixture(scope="module")
def model():
    return make_model().double()


def reference_contrast(last: Tensor, early: Tensor, strength: float, share: float) -> list[float]:
    """Return probabilities, token by token."""
    p, q = ([math.exp(x) for x in logits.tolist()] for logits in (last, early))
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    plausible = [v for v in range(len(p)) if p[v] >= share * max(p)]
    score = {v: p[v] ** (1 + strength) * q[v] ** -strength for v in plausible}
    mass, total = sum(p[v] for v in plausible), sum(score.values())
    return [mass * score[v] / total if v in score else p[v] for v in range(len(p))]


def random_logits(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(count, 50, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_contrast_equals_its_formula_in_float64(strength: float, share: float):
    last, early = random_logits()
    got = contrasted(last, early, strength=strength, share=share).exp()
    want = torch.tensor(reference_contrast(last, early, strength, share), dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    assert float(got.sum()) == pytest.approx(1.0, abs=1e-12)
    unchanged = strength == 0.0 or share == 1.0
    torch.testing.assert_close(got, last.softmax(-1)) if unchanged else None
    assert unchanged == torch.allclose(got, last.softmax(-1))


def decoded(
    model,
    prompt: list[int],
    kv_cache: str,
    *,
    prefill: int | None = None,
    contrast: tuple[int, float, float] | None = None,
    count: int = 8,
) -> list[int]:
    """Decode greedily with the reference, at R = 3."""
    reference = Reference(model, kv_cache, prefill or STEPS)
    states = reference.prompt(prompt)
    if prefill is not None:
        reference.kept.pop()  # the last token begins again
        states = reference.token(prompt[-1], STEPS)
    tokens = []
    for _ in range(count):
        last = reference.logits(states[-1])
        if contrast is not None:
            early, strength, share = contrast
            early_logits = reference.logits(states[early - 1])
            last = torch.tensor(reference_contrast(last, early_logits, strength, share))
        tokens.append(int(last.argmax()))
        states = reference.token(tokens[-1], STEPS)
    return tokens


def completed(model, texts: list[list[int]], **engine) -> list[list[int]]:
    """Two rows at a time: a third prompt enters while others run."""
    requests = [Request(prompt=text, max_new_tokens=8) for text in texts]
    return [done.tokens for done in Engine(model, **engine).complete(requests, rows=2)]


@torch.no_grad()
@pytest.mark.parametrize("kv_cache", STRATEGIES)
@pytest.mark.parametrize("early", [1, 2])
def test_greedy_contrast_equals_the_reference_in_every_cache(model, kv_cache, early):
    given = prompts(6, 2, 4)
    contrast = (early, 2.0, 0.05)
    got = completed(model, given, kv_cache=kv_cache, exit_policy=Contrast(*contrast))
    want = [decoded(model, prompt, kv_cache, contrast=contrast) for prompt in given]
    assert got == want
    assert got != [decoded(model, prompt, kv_cache) for prompt in given]  # it did change something


@torch.no_grad()
def test_samples_come_from_the_contrasted_distribution(model):
    """Each frequency within 5 standard deviations; false failures below 1e-4 over 128 tokens."""
    prompt, rows = prompts(3)[0], 1500
    requests = [Request(prompt=prompt, max_new_tokens=1)] * rows
    engine = Engine(model, exit_policy=Contrast(1, 1.0, 0.2))
    done = engine.complete(
        requests, sampling=Sampling(temperature=1.0), generator=torch.Generator().manual_seed(0)
    )
    states = model(torch.tensor([prompt])).hidden_RBLD
    last, early = (model.readout(states[r])[0, -1] for r in (2, 0))
    want = torch.tensor(reference_contrast(last, early, 1.0, 0.2))
    plain = last.softmax(-1)
    counts = torch.bincount(torch.tensor([one.tokens[0] for one in done]), minlength=len(want))
    deviation = (rows * want * (1 - want)).sqrt()
    assert ((counts - rows * want).abs() <= 5 * deviation + 1).all()
    assert not ((counts - rows * plain).abs() <= 5 * deviation + 1).all()


@torch.no_grad()
@pytest.mark.parametrize("kv_cache", STRATEGIES)
@pytest.mark.parametrize("prefill", [1, 2, 3])
def test_a_short_prefill_equals_the_reference_in_every_cache(model, kv_cache, prefill):
    given = prompts(6, 1, 4)
    got = completed(model, given, kv_cache=kv_cache, prefill_steps=prefill)
    if kv_cache == "full":  # the others see other keys of the prompt
        assert (got == completed(model, given, kv_cache=kv_cache)) == (prefill == STEPS)
    assert got == [decoded(model, prompt, kv_cache, prefill=prefill) for prompt in given]


@torch.no_grad()
def test_a_short_prefill_saves_its_steps_and_goes_with_drafts_and_layers_outside_the_loop():
    outside = make_model(n_layers=4, prelude_layers=1, coda_layers=1).double()
    given = prompts(9, 5)
    engine = Engine(outside, prefill_steps=1)
    requests = [Request(prompt=text, max_new_tokens=4) for text in given]
    plain = [done.tokens for done in engine.complete(requests)]
    assert engine.work.token_steps == 2 * 9 + 2 * 3 * 4
    drafting = Engine(outside, prefill_steps=1, speculation=SelfSpeculation(1, 2))
    assert [done.tokens for done in drafting.complete(requests)] == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent_steps": 1, "exit_policy": Contrast(1)}, r"contrast:1 needs a later step"),
        ({"recurrent_steps": 3, "exit_policy": Contrast(3)}, r"recurrent_steps=3 must be above it"),
        ({"prefill_steps": 4}, r"prefill_steps=4 is above the 3 recurrent steps of generated"),
        ({"prefill_steps": 0}, r"prefill_steps=0 must be at least 1"),
        (
            {"prefill_steps": 3, "exit_policy": StaticStep(2)},
            r"prefill_steps=3 is above the 2 recurrent steps",
        ),
        (
            {"exit_policy": Contrast(1), "speculation": SelfSpeculation(1, 2)},
            r"draft_step verifies at a fixed depth",
        ),
    ],
)
def test_what_cannot_work_is_one_line(model, options, message):
    with pytest.raises(UserError, match=message) as raised:
        Engine(model, **options)
    assert "\n" not in str(raised.value)
