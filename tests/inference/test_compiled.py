"""Compiled visits generate the engine's tokens; most tests interpret the traced graph."""

import logging

import pytest

from tests.inference.reference import make_model, prompts
from tests.inference.test_captured import CASES
from titan_loop.inference import captured, compiled, engine
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import KLAndEntropy, QExit, StaticStep
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation


@pytest.fixture
def interpreted(monkeypatch) -> list:
    """Graphs that would have been compiled."""
    graphs = []

    def interpret(graph, tensors, mode):
        graphs.append(graph)
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr(compiled, "_code", interpret)
    monkeypatch.setattr(captured, "OFTEN", 1)
    return graphs


def same(model, *, rows=2, streams=1, **options) -> Engine:
    """Return an engine that compiles, after it generated what one that does not does."""
    asked = [
        Request(prompt=prompt, max_new_tokens=count)
        for prompt, count in zip(prompts(5, 2), (4, 3), strict=True)
    ]
    one, other = (Engine(model, compile=compiles, **options) for compiles in (True, False))
    want = other.complete(asked, rows=rows)
    for _ in range(streams):
        assert one.complete(asked, rows=rows) == want
    assert one.stack.captures, "a visit could not be compiled"
    return one


@pytest.mark.parametrize(("model", "kv_cache"), CASES)
def test_compiled_visits_generate_the_same(interpreted, model, kv_cache):
    same(model.double(), kv_cache=kv_cache, recurrent_steps=2)
    assert interpreted


@pytest.mark.parametrize(
    ("policy", "rows"),
    [(QExit(0.7), 1), (StaticStep(2), 2), (QExit(0.7), 2), (KLAndEntropy(0.05, 3.0), 2)],
)
def test_compiled_visits_leave_with_every_kind_of_policy(interpreted, policy, rows):
    one = same(make_model(n_layers=1).double(), rows=rows, exit_policy=policy)
    assert one._idle is not None
    assert None not in {kind.step for kind in one._idle[1]._visits}  # of rows at different steps


def test_other_weights_are_compiled_anew(interpreted):
    model = make_model(n_layers=1).double()
    one = same(model, rows=1, recurrent_steps=1)
    model.load_state_dict(
        {name: 2 * value for name, value in model.state_dict().items()}, assign=True
    )
    asked = [Request(prompt=[1, 2, 3], max_new_tokens=4)]
    assert one.complete(asked) == Engine(model, recurrent_steps=1).complete(asked)


def test_steps_share_code_and_streams_share_visits(interpreted):
    model = make_model().double()
    engine = same(model, rows=1, streams=2)
    assert len(interpreted) == 2  # with the token's embedding, and all the later steps
    assert len(engine._idle[1]._visits) == 3
    nodes = {str(node.target) for graph in interpreted for node in graph.graph.nodes}
    assert not {node for node in nodes if "mm" in node or "attention" in node}


def test_inductor_generates_the_same(monkeypatch, inductor):
    """Steps 2 and 3, which share their code; the first step is interpreted."""
    real, compiled_graphs = compiled._code, []

    def code(graph, tensors, mode):
        if "embedding" in graph.code:
            return lambda inputs: graph(*inputs)
        compiled_graphs.append(graph)
        return real(graph, tensors, mode)

    monkeypatch.setattr(compiled, "_code", code)
    same(make_model(n_layers=1).double(), rows=1)
    assert len(compiled_graphs) == 1


def test_what_cannot_be_compiled_goes_on_without(monkeypatch, caplog):
    model = make_model().double()
    asked = [Request(prompt=[1, 2, 3], max_new_tokens=9)]
    wanted = Engine(model).complete(asked)
    step = model.step
    monkeypatch.setattr(
        model, "step", lambda carry, *rest: step(carry * float(carry.isfinite().all()), *rest)
    )
    looking = Engine(model, compile=True)
    assert looking.complete(asked) == wanted
    (told,) = (each.message for each in caplog.records if each.name == captured.__name__)
    assert told.startswith("model.family=ouro with a FullCache cannot be compiled, so the host ")


def test_a_machine_without_a_compiler_is_told_so(monkeypatch, caplog):
    monkeypatch.setattr(engine, "missing_compiler", lambda device: "no C++ compiler (g++)")
    with caplog.at_level(logging.WARNING):
        assert not Engine(make_model(), compile=True).stack.captures
    assert caplog.messages == ["compile: no C++ compiler (g++) found; running eagerly"]


def test_hooks_see_every_visit(interpreted):
    model, seen = make_model(n_layers=1).double(), []
    looking = same(model, rows=1)
    handle = model.layers["0"].register_forward_hook(lambda *_: seen.append(1))
    looking.complete([Request(prompt=[1, 2, 3], max_new_tokens=4)])
    handle.remove()
    assert len(seen) == 4 * model.recurrent_steps


def test_drafts_are_not_compiled():
    with pytest.raises(engine.UserError, match="compile has no effect with draft_step"):
        Engine(make_model(), compile=True, speculation=SelfSpeculation())
