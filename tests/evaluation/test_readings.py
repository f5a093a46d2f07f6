"""Readings: all depths from one pass equal separate passes, and policies end at static depths."""

import math

import pytest
import torch

from tests.inference.reference import CONTEXT, VOCABULARY, make_model
from titan_loop.errors import UserError
from titan_loop.evaluation.readings import (
    depth_readings,
    frontier_readings,
    policy_reading,
    score_states,
)
from titan_loop.evaluation.token_scorer import TokenRequest, TokenScorer

ROWS = 3


def windows() -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(1))


def states_and_labels(model, steps: int):
    tokens = windows()
    output = model(tokens, recurrent_steps=steps, collect="all")
    flat = [hidden_BLD[:, :-1].flatten(0, 1) for hidden_BLD in output.hidden_RBLD]
    return flat, tokens[:, 1:].flatten()


@torch.no_grad()
def test_eight_depths_in_one_pass_equal_eight_passes():
    model = make_model()
    states, labels = states_and_labels(model, 8)
    swept = score_states(model, states, labels, depth_readings(range(1, 9)))
    for depth in range(1, 9):
        hidden_BLD = model(windows(), recurrent_steps=depth, collect="last").hidden_RBLD[0]
        logits = model.readout(hidden_BLD[:, :-1]).flatten(0, 1)
        separate = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        # The same numbers are added in another order: rounding of fp32.
        assert torch.allclose(swept.nats_PT[depth - 1], separate, atol=2e-5, rtol=0)
        assert (swept.right_PT[depth - 1] == (logits.argmax(-1) == labels)).all()
        assert (swept.step_PT[depth - 1] == depth).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("shallow", "step", "deep"),
    [
        ("q:0", 1, "q:1"),
        ("hidden:inf", 2, "hidden:0"),
        ("fixed_point:inf", 2, "fixed_point:0"),
        ("margin:inf", 2, "margin:0"),
        ("confidence:0", 1, "confidence:1"),
        ("kl:inf,inf", 2, "kl:0,0"),
    ],
)
def test_every_policy_meets_static_depth_at_both_ends(shallow: str, step: int, deep: str):
    model = make_model()
    states, labels = states_and_labels(model, 4)
    readings = [*(policy_reading(text, 4) for text in (shallow, deep)), *depth_readings((step, 4))]
    scores = score_states(model, states, labels, readings)
    for policy, static in ((0, 2), (1, 3)):
        assert (scores.step_PT[policy] == scores.step_PT[static]).all()
        assert (scores.nats_PT[policy] == scores.nats_PT[static]).all()


@torch.no_grad()
def test_a_frontier_reads_every_policy_from_its_shallowest_to_its_deepest():
    model = make_model()
    states, labels = states_and_labels(model, 4)
    readings = frontier_readings(model, states, 4)
    steps = score_states(model, states, labels, readings).step_PT.double().mean(1).tolist()
    means = dict(zip([reading.name for reading in readings], steps, strict=True))
    by_policy: dict[str, dict[str, float]] = {}
    for name, mean in means.items():
        by_policy.setdefault(name.partition(":")[0], {})[name] = mean
    assert [*by_policy.pop("static").values()] == [1, 2, 3, 4]
    for name, mine in by_policy.items():
        assert (min(mine.values()), max(mine.values())) == (
            1 + (name not in ("q", "confidence")),
            4,
        )
        assert len(mine) == (12 if name in ("q", "confidence") else 9)
    moved = torch.cat([(states[step] - states[step - 1]).norm(dim=-1) for step in (1, 2, 3)])
    ranked = moved.double().sort().values
    kept = [ranked[int(q * (len(ranked) - 1))] for q in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)]
    assert [*by_policy["hidden"]][1:-1] == [f"hidden:{float(x):.4g}" for x in kept]
    gateless = make_model(exit_gate=False)
    assert not [r for r in frontier_readings(gateless, states, 4) if r.name.startswith("q:")]
    assert [r.name for r in frontier_readings(gateless, states[:1], 1)] == ["static:1"]


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    model = make_model()
    with torch.no_grad():
        states, labels = states_and_labels(model, 3)
    readings = [policy_reading("kl:0.3,4.8", 3), policy_reading("q:0.5", 3)]
    whole = score_states(model, states, labels, readings)
    monkeypatch.setattr("titan_loop.evaluation.readings._LOGITS_AT_A_TIME", 3 * VOCABULARY * 10)
    parts = score_states(model, states, labels, readings)
    assert torch.allclose(whole.nats_PT, parts.nats_PT, atol=2e-5, rtol=0)
    assert (whole.step_PT == parts.step_PT).all()


def requests() -> list[TokenRequest]:
    tokens = windows().tolist()
    long, middle, short = tuple(tokens[0]), tuple(tokens[1][:20]), tuple(tokens[2][:4])
    return [
        TokenRequest(middle, (5,)),
        TokenRequest(long[:40], long[40:]),
        TokenRequest(middle, (7,)),
        TokenRequest(short[:1], short[1:]),
        TokenRequest(middle, (9,)),
    ]


@torch.no_grad()
def test_batches_equal_single_requests_and_answers_of_one_token_share_a_pass():
    model = make_model()
    readings = [*depth_readings((1, 3)), policy_reading("q:0.6", 4)]
    rows: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    together = TokenScorer(model, readings, batch_rows=4).score(requests())
    hook.remove()
    assert sum(rows) == 3  # different inputs, not five
    for request, score in zip(requests(), together, strict=True):
        (alone,) = TokenScorer(model, readings, batch_rows=1).score([request])
        assert score.nats == pytest.approx(alone.nats, abs=1e-4)
        assert score[1:] == alone[1:]
        tokens = torch.tensor([[*request.context, *request.continuation]])
        hidden = model(tokens, recurrent_steps=3, collect="last").hidden_RBLD[0]
        log_prob = model.readout(hidden).log_softmax(-1)[0, len(request.context) - 1 : -1]
        label = torch.tensor(request.continuation)
        expected = -float(log_prob.gather(1, label[:, None]).sum())
        assert score.nats[1] == pytest.approx(expected, abs=1e-4)
        assert score.greedy[1] == bool((log_prob.argmax(-1) == label).all())
        assert score.tokens == len(label)
        assert score.steps[:2] == [len(label), 3 * len(label)]


def test_bad_requests_and_readings_are_refused():
    model = make_model()
    for readings, text in (
        (lambda: depth_readings([0, 2]), "at least 1"),
        (lambda: [policy_reading("full", 0)], "recurrent_steps=0"),
        (lambda: [policy_reading("static:5", 4)], "beyond recurrent_steps=4"),
    ):
        with pytest.raises(UserError, match=text):
            TokenScorer(model, readings())
    with pytest.raises(UserError, match="needs an exit gate"):
        TokenScorer(make_model(exit_gate=False), [policy_reading("q:0.5", 4)])
    scorer = TokenScorer(model, depth_readings([1]))
    assert not math.isnan(scorer.score([TokenRequest((1,) * CONTEXT, (1,))])[0].nats[0])
