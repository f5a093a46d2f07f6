"""Visits that are captured or compiled: their kinds, and that they generate the same."""

import pytest
import torch

from tests.inference.reference import CONTEXT, make_model, prompts
from tests.models.ponder import ponder_model
from titan_loop.inference import captured
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import HiddenDifference, QExit, StaticStep
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling


class Fixing(Engine):
    """An engine that fixes its visits, and compiles none."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.stack.captures = True

    def _captured(self, cache):
        self.captured = captured.CapturedVisits(self.stack, cache)
        return self.captured


@pytest.fixture(autouse=True)
def taken(monkeypatch) -> list[captured.Kind]:
    """Kinds that would have been captured."""
    kinds: list[captured.Kind] = []
    monkeypatch.setattr(
        captured.FixedVisit, "compile", lambda visit, known: kinds.append(visit._kind)
    )
    return kinds


def models():
    yield "plain", make_model()
    yield "two leaves", ponder_model(max_seq_len=CONTEXT).eval()
    yield "injection", make_model(injection="diagonal")
    yield "layers outside", make_model(n_layers=3, prelude_layers=1, coda_layers=1)


CASES = [
    pytest.param(model, kv_cache, id=f"{name}-{kv_cache}")
    for name, model in models()
    for kv_cache in (("full", "last", "first", "averaged") if name == "plain" else ("full",))
]


@pytest.mark.parametrize(("model", "kv_cache"), CASES)
def test_fixed_visits_generate_the_same(monkeypatch, model, kv_cache):
    monkeypatch.setattr(captured, "KEYS", 4)
    model = model.double()
    asked = [
        Request(prompt=prompt, max_new_tokens=count, log_probs=True)
        for prompt, count in zip(prompts(5, 2, 7), (6, 3, 5), strict=True)
    ]
    for policy in (StaticStep(), QExit(0.7), HiddenDifference(4.5)):
        fixed, plain = (
            kind(model, kv_cache=kv_cache, exit_policy=policy) for kind in (Fixing, Engine)
        )
        got, want = (
            engine.complete(
                asked,
                rows=2,
                sampling=Sampling(temperature=0.8),
                generator=torch.Generator().manual_seed(1),
            )
            for engine in (fixed, plain)
        )
        for one, other in zip(got, want, strict=True):
            assert (one.tokens, one.steps) == (other.tokens, other.steps)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)
        assert fixed.work.applications == plain.work.applications


def test_a_kind_of_visit_is_captured_once_it_comes_up_often(monkeypatch, taken):
    monkeypatch.setattr(captured, "KEYS", 16)
    engine = Fixing(make_model().double())
    engine.complete([Request(prompt=[1, 2, 3], max_new_tokens=18)])
    # Three steps, of which the last is read; the first token's first step has no state to copy.
    steps = [(1, True, False), (2, False, False), (3, False, True)]
    found = {(kind.step, kind.starts, kind.reads, kind.keys) for kind in engine.captured._visits}
    assert found == {(*step, keys) for step in steps for keys in (16, 3 + 18)}
    assert {kind.keys for kind in taken} == {16, 3 + 18}
    assert len(taken) == 6
    taken.clear()
    Fixing(make_model().double()).complete([Request(prompt=[1, 2, 3], max_new_tokens=3)])
    assert not taken
    monkeypatch.setattr(captured, "MOST_KINDS", 2)
    engine.complete([Request(prompt=[1, 2, 3], max_new_tokens=18)])
    assert len(engine.captured._visits) == 2


def test_what_cannot_be_captured_goes_on_without(monkeypatch, caplog):
    def fail(visit, known):
        raise RuntimeError("operation not permitted\nwhere") from None

    monkeypatch.setattr(captured.FixedVisit, "compile", fail)
    model = make_model().double()
    asked = [Request(prompt=[1, 2, 3], max_new_tokens=9)]
    engine = Fixing(model)
    assert engine.complete(asked) == Engine(model).complete(asked)
    assert not engine.stack.captures
    (told,) = caplog.messages
    assert told == (
        "model.family=ouro with a FullCache cannot be compiled, so the host decides its speed: "
        "operation not permitted"
    )
