"""Self-speculation must not change what is generated: token for token, or in distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inference.reference import make_model, prompts
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling, probabilities
from titan_loop.inference.speculative import SelfSpeculation, accepted_count

RAGGED = (5, 1, 9)


def requests(prompts, count: int = 14, **options) -> list[Request]:
    return [Request(prompt=prompt, max_new_tokens=count, **options) for prompt in prompts]


@pytest.mark.parametrize(("draft_step", "draft_tokens"), [(1, 1), (1, 5), (2, 3), (3, 1), (3, 5)])
def test_greedy_output_equals_plain_greedy_in_float64(draft_step, draft_tokens):
    model = make_model().double()
    asked = requests(prompts(*RAGGED))
    speculation = SelfSpeculation(draft_step, draft_tokens)
    engine = Engine(model, recurrent_steps=4, speculation=speculation)
    got = engine.complete(asked)
    assert got == Engine(model, recurrent_steps=4).complete(asked)
    assert 0 < speculation.accepted <= speculation.drafted
    assert speculation.acceptance == speculation.accepted / speculation.drafted
    told = requests(prompts(*RAGGED), log_probs=True)
    plain = Engine(model, recurrent_steps=4).complete(told)
    for row, other in zip(engine.complete(told), plain, strict=True):
        assert row.log_probs == pytest.approx(other.log_probs)


def test_a_draft_as_good_as_the_model_is_always_accepted_and_saves_calls():
    """With branches of gain 0 and a final norm of gain 1, steps 2 … 4 change nothing any more."""
    model = make_model().double()
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
        for layer in model.layers.values():
            layer.attention_post_norm.weight.zero_()
            layer.ffn_post_norm.weight.zero_()
    speculation = SelfSpeculation(1, 3)
    asked = requests(prompts(4), 13)
    engine = Engine(model, recurrent_steps=4, speculation=speculation)
    got = engine.complete(asked)
    assert got == Engine(model, recurrent_steps=4).complete(asked)
    assert speculation.acceptance == 1.0
    assert speculation.rounds == 3  # 12 tokens after the first, 4 a round
    # prompt 4; each round 4 tokens × 1 step, then steps 2 … 4 on all of them at once
    assert engine.work.applications == 4 + 3 * (4 + 3)


def test_stop_tokens_and_limits_end_a_row_inside_a_round():
    model = make_model().double()
    plain = Engine(model).complete(requests(prompts(5)))[0].tokens
    for limit in (1, 2, 3, 7):
        engine = Engine(model, speculation=SelfSpeculation(2, 3))
        assert engine.complete(requests(prompts(5), limit))[0].tokens == plain[:limit]
    cut = next(i for i in range(2, 14) if plain[i] not in plain[:i])
    stop = Request(prompt=prompts(5)[0], max_new_tokens=14, stop_tokens=frozenset([plain[cut]]))
    got = Engine(model, speculation=SelfSpeculation(2, 3)).complete([stop])[0]
    assert (got.tokens, got.finish) == (plain[:cut], "stop_token")


def test_rounds_reach_the_end_of_the_context():
    model = make_model().double()
    asked = requests(prompts(41, 30, 3), 12)
    got = Engine(model, speculation=SelfSpeculation(1, 5)).complete(asked)
    assert got == Engine(model).complete(asked)
    assert [c.finish for c in got] == ["context", "limit", "limit"]


ROWS = 1500


@torch.no_grad()
def test_samples_have_the_distribution_of_the_last_step():
    """χ² of three tokens against their exact joint distribution; false failures: 1e-4.

    The draft's distribution fails the same test, so the test can see the difference.
    """
    vocabulary, sampling = 7, Sampling(temperature=0.8, top_k=5, top_p=0.9)
    model = make_model(vocab_size=vocabulary).double()
    prompt = prompts(4, vocabulary=vocabulary)[0]
    asked = requests([prompt] * ROWS, 3)

    def sampled(steps: int, speculation: SelfSpeculation | None) -> Counter:
        engine = Engine(model, recurrent_steps=steps, speculation=speculation)
        generator = torch.Generator().manual_seed(17)
        completions = engine.complete(asked, sampling=sampling, generator=generator)
        return Counter(tuple(completion.tokens) for completion in completions)

    exact = _joint_distribution(model, prompt, sampling, vocabulary)
    speculation = SelfSpeculation(1, 2)
    assert _fits(sampled(3, speculation), exact)
    assert 0.05 < speculation.acceptance < 0.95  # both branches of the rule were taken
    assert not _fits(sampled(1, None), exact)


def _joint_distribution(model, prompt, sampling, vocabulary) -> dict[tuple[int, ...], float]:
    """Three tokens at R = 3, from full forwards over every continuation."""
    joint = {(): 1.0}
    for _ in range(3):
        grown = {}
        for tokens, mass in joint.items():
            state = model(torch.tensor([prompt + list(tokens)]), recurrent_steps=3).hidden_RBLD[-1]
            law = probabilities(model.readout(state)[0, -1], sampling).tolist()
            grown |= {(*tokens, v): mass * law[v] for v in range(vocabulary) if law[v] > 0}
        joint = grown
    assert math.isclose(sum(joint.values()), 1.0)
    return joint


def _fits(counts: Counter, exact: dict[tuple[int, ...], float]) -> bool:
    """χ² test at 1e-4; cells with fewer than 5 expected are taken together."""
    if not counts.keys() <= exact.keys():
        return False
    cells, rare = [], [0.0, 0.0]
    for tokens, mass in exact.items():
        pair = [counts[tokens], mass * ROWS]
        if pair[1] >= 5:
            cells.append(pair)
        else:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
    if rare[1] > 0:
        cells.append(rare)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's cube-root approximation of the quantile; z of 1e-4 is 3.719
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic < limit


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 6))
@settings(max_examples=60)
def test_acceptance_stops_at_the_first_refusal(seed, drafts, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand((2, 3, drafts, vocabulary), generator=generator).softmax(-1)
    x = torch.randint(vocabulary, (3, drafts), generator=generator)
    u = torch.rand((3, drafts), generator=generator)
    got = accepted_count(x, q, p, u).tolist()
    for row in range(3):
        expected = 0
        for i in range(drafts):
            token = int(x[row, i])
            if u[row, i] >= min(1.0, float(p[row, i, token] / q[row, i, token])):
                break
            expected += 1
        assert got[row] == expected
