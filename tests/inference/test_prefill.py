"""Short prefills, against a float64 decoder that knows none."""

import pytest
import torch

from tests.inference.reference import Reference, make_model, prompts
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import (
    StaticStep,
)
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation

STRATEGIES = ("full", "last", "first", "averaged")
EXACT = 1e-12
STEPS = 3


@pytest.fixture(scope="module")
def model():
    return make_model().double()


def decoded(
    model,
    prompt: list[int],
    kv_cache: str,
    *,
    prefill: int | None = None,
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
        tokens.append(int(last.argmax()))
        states = reference.token(tokens[-1], STEPS)
    return tokens


def completed(model, texts: list[list[int]], **engine) -> list[list[int]]:
    """Two rows at a time: a third prompt enters while others run."""
    requests = [Request(prompt=text, max_new_tokens=8) for text in texts]
    return [done.tokens for done in Engine(model, **engine).complete(requests, rows=2)]


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
        ({"prefill_steps": 4}, r"prefill_steps=4 is above the 3 recurrent steps of generated"),
        ({"prefill_steps": 0}, r"prefill_steps=0 must be at least 1"),
        (
            {"prefill_steps": 3, "exit_policy": StaticStep(2)},
            r"prefill_steps=3 is above the 2 recurrent steps",
        ),
    ],
)
def test_what_cannot_work_is_one_line(model, options, message):
    with pytest.raises(UserError, match=message) as raised:
        Engine(model, **options)
    assert "\n" not in str(raised.value)
