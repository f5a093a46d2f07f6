"""What generation must equal: an independent float64 decoder, the full forward, itself alone."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inference.reference import CONTEXT, generate, make_model, prompts
from tests.models.ponder import ponder_model
from tests.support.hardware import requires_gpu
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import (
    Confidence,
    ExitPolicy,
    FixedPoint,
    HiddenDifference,
    KLAndEntropy,
    Margin,
    QExit,
    StaticStep,
)
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling
from titan_loop.inference.speculative import SelfSpeculation

STRATEGIES = ("full", "last", "first", "averaged")
FLOAT64 = 1e-9  # rounding of a few thousand float64 sums, amplified by a few layers


def requests(prompts, count: int = 8) -> list[Request]:
    return [Request(prompt=prompt, max_new_tokens=count) for prompt in prompts]


@pytest.fixture(scope="module")
def model():
    return make_model().double()


def full_forward_greedy(model, prompt: list[int], count: int, steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        states = model(torch.tensor([tokens]), recurrent_steps=steps).hidden_RBLD
        tokens.append(int(model.readout(states[-1])[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(1, 7, 4), (4, 4, 4)], ids=["ragged", "in step"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_decoding_with_the_full_cache_equals_the_full_forward_at_every_depth(model, steps, lengths):
    given = prompts(*lengths)
    got = Engine(model, recurrent_steps=steps).complete(requests(given))
    for prompt, completion in zip(given, got, strict=True):
        assert completion.tokens == full_forward_greedy(model, prompt, 8, steps)
        assert completion.steps == [steps] * 8
        assert completion.finish == "limit"


def q_exit(threshold: float):
    def leaves(states, reference):
        survival = math.prod(1 - 1 / (1 + math.exp(-reference.gate(h))) for h in states)
        return 1 - survival >= threshold

    return leaves


def hidden_difference(epsilon: float):
    def leaves(states, reference):
        return len(states) > 1 and float((states[-1] - states[-2]).norm()) < epsilon

    return leaves


def relative_difference(epsilon: float):
    def leaves(states, reference):
        if len(states) < 2:
            return False
        return float((states[-1] - states[-2]).norm() / states[-1].norm()) < epsilon

    return leaves


def margin(epsilon: float):
    def leaves(states, reference):
        if len(states) < 2:
            return False
        before, now = (reference.logits(h).tolist() for h in states[-2:])
        top = max(range(len(now)), key=now.__getitem__)
        leads = [x[top] - max(x[:top] + x[top + 1 :]) for x in (now, before)]
        return abs(leads[0] - leads[1]) < epsilon * leads[0]

    return leaves


def confidence(probability: float):
    def leaves(states, reference):
        return float(reference.logits(states[-1]).softmax(-1).max()) > probability

    return leaves


def kl_and_entropy(kl: float, entropy: float):
    def leaves(states, reference):
        if len(states) < 2:
            return False
        before, now = (reference.logits(h).softmax(0) for h in states[-2:])
        divergence = float((now * (now / before).log()).sum())
        return divergence < kl and float(-(now * now.log()).sum()) < entropy

    return leaves


POLICIES = {
    "static": (StaticStep(), lambda states, reference: False),
    "q": (QExit(0.7), q_exit(0.7)),
    "hidden": (HiddenDifference(4.5), hidden_difference(4.5)),
    "fixed_point": (FixedPoint(0.55), relative_difference(0.55)),
    "margin": (Margin(0.5), margin(0.5)),
    "confidence": (Confidence(0.055), confidence(0.055)),
    "kl": (KLAndEntropy(0.2, 4.5), kl_and_entropy(0.2, 4.5)),
}


# Every policy with one cache, and every cache with tokens that leave and tokens that do not.
@pytest.mark.parametrize(
    ("kv_cache", "policy"),
    [
        *((STRATEGIES[0], policy) for policy in POLICIES),
        *((each, policy) for each in STRATEGIES[1:] for policy in ("q", "static")),
    ],
)
def test_every_cache_and_policy_equals_the_float64_reference(model, kv_cache, policy):
    """Batched and ragged, rows drift apart in their steps; the reference decodes one row alone."""
    ours, theirs = POLICIES[policy]
    ragged = prompts(6, 2, 4)
    got = Engine(model, kv_cache=kv_cache, exit_policy=ours).complete(requests(ragged))
    used = set()
    for prompt, completion in zip(ragged, got, strict=True):
        tokens, steps, _ = generate(model, prompt, 8, kv_cache=kv_cache, leaves=theirs)
        assert (completion.tokens, completion.steps) == (tokens, steps)
        used.update(steps)
    assert len(used) > 1 or policy == "static"  # the policy did decide something


@torch.no_grad()
@pytest.mark.parametrize("kv_cache", STRATEGIES)
def test_logits_in_decoding_equal_the_reference(model, kv_cache):
    """Tokens alone would hide small errors."""
    prompt = prompts(5)[0]
    tokens, _, logits = generate(model, prompt, 6, kv_cache=kv_cache)
    seen = []
    engine = Engine(model, kv_cache=kv_cache)
    readout = engine.stack.readout
    engine.stack.readout = lambda hidden: seen.append(readout(hidden)) or seen[-1]
    assert engine.complete(requests([prompt], 6))[0].tokens == tokens
    for got, want in zip(seen, logits, strict=True):
        torch.testing.assert_close(got[0, 0], want, atol=FLOAT64, rtol=0)


@pytest.mark.parametrize("kv_cache", STRATEGIES)
def test_waiting_requests_take_the_places_of_finished_ones(model, kv_cache):
    """Two places for five requests: the same completions, in a cache of two rows."""
    limits = (3, 9, 1, 6, 4)
    asked = [
        Request(prompt=p, max_new_tokens=n)
        for p, n in zip(prompts(4, 2, 7, 1, 5), limits, strict=True)
    ]
    sampling = Sampling(temperature=0.8)
    for policy in (QExit(0.7), KLAndEntropy(0.2, 4.5)):
        engine = Engine(model, kv_cache=kv_cache, exit_policy=policy)
        together, few = (
            engine.complete(
                asked, rows=rows, sampling=sampling, generator=torch.Generator().manual_seed(1)
            )
            for rows in (None, 2)
        )
        assert together == few
    rows_a_call = set()
    hook = model.layers["0"].register_forward_hook(
        lambda module, args, output: rows_a_call.add(output.shape[0])
    )
    engine.complete(asked[:2])
    two_rows = engine.work.cache_bytes
    engine.complete(asked, rows=2)
    hook.remove()
    assert rows_a_call == {1, 2}
    # The longest request, of 11 tokens, is among the first two.
    assert engine.work.cache_bytes == two_rows
    with pytest.raises(UserError, match="rows=0 must be at least 1"):
        engine.complete(asked, rows=0)


class _Scripted(ExitPolicy):
    """Row b leaves after the steps of its script, in turn; the first entry is the prompt's."""

    name = "static"

    def __init__(self, scripts):
        self.scripts = [list(script) for script in scripts]
        self.at_once = set()

    def fires(self, evidence):
        steps = evidence.step_BL[:, 0].tolist()
        self.scripts = [script for script in self.scripts if script]  # the others are done
        self.at_once.add(tuple(steps))
        fired = [step == script[0] for step, script in zip(steps, self.scripts, strict=True)]
        for script, now in zip(self.scripts, fired, strict=True):
            if now:
                script.pop(0)
        return torch.tensor(fired).unsqueeze(1)


@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.lists(st.integers(1, 3), min_size=4, max_size=4), min_size=2, max_size=2),
    st.lists(st.integers(1, 6), min_size=2, max_size=2),
)
@settings(max_examples=10)
def test_any_exit_steps_in_any_cache_equal_the_reference(kv_cache, scripts, lengths):
    model = make_model().double()
    ragged = prompts(*lengths)
    scripts = [[3, *script] for script in scripts]  # the prompt's step first
    got = Engine(model, kv_cache=kv_cache, exit_policy=_Scripted(scripts)).complete(
        requests(ragged, 5)
    )
    for prompt, script, completion in zip(ragged, scripts, got, strict=True):
        asked = itertools.count()  # about steps 1 and 2; after the prompt, twice a token

        def leaves(states, reference, script=script, asked=asked):
            return len(states) == script[(next(asked) + 2) // 4]

        tokens, steps, _ = generate(model, prompt, 5, kv_cache=kv_cache, leaves=leaves)
        assert (completion.tokens, completion.steps) == (tokens, steps) == (tokens, script)


def test_work_is_skipped_and_rows_at_different_steps_share_a_call(model):
    """Nine token-steps of row 0 and nine of row 1: nine calls, not the eighteen of lock step."""
    scripts = ([3, 1, 1, 3, 1, 3], [3, 3, 1, 3, 1, 1])
    visits = []
    hook = model.layers["0"].register_forward_hook(
        lambda module, args, output: visits.append(output.shape[0])
    )
    policy = _Scripted(scripts)
    engine = Engine(model, exit_policy=policy)
    got = engine.complete(requests(prompts(4, 4), 6))
    hook.remove()
    assert [completion.steps for completion in got] == [list(script) for script in scripts]
    assert len(visits) == engine.work.applications == 3 + 9
    assert visits[3:] == [2] * 9
    assert engine.work.token_steps == 3 * 2 * 4 + 2 * 9
    mixed = {steps for steps in policy.at_once if len(set(steps)) > 1}
    assert {(1, 2), (1, 3)} <= mixed


@pytest.mark.parametrize(
    "kv_cache", [pytest.param(name, marks=requires_gpu()) for name in STRATEGIES]
)
def test_a_gpu_generates_what_the_cpu_does(model, kv_cache):
    """Float64, so that only mistakes can differ."""
    on_gpu = make_model().double().to("cuda")
    asked = requests(prompts(5, 2, 7))
    for policy in (QExit(0.7), KLAndEntropy(0.2, 4.5), HiddenDifference(4.5)):
        options = {"kv_cache": kv_cache, "exit_policy": policy}
        sampling = Sampling(temperature=0.8, top_p=0.9)
        got, want = (
            Engine(which, **options).complete(
                asked, rows=2, sampling=sampling, generator=torch.Generator().manual_seed(1)
            )
            for which in (on_gpu, model)
        )
        assert got == want
    if kv_cache == "full":
        drafted = Engine(on_gpu, speculation=SelfSpeculation(1, 3)).complete(asked)
        assert drafted == Engine(model).complete(asked)


@torch.no_grad()
def test_every_row_keeps_its_own_carry():
    """A carry of two leaves that depends on the step; rows drift apart, end and make room."""
    pondering = ponder_model(max_seq_len=CONTEXT).eval()
    ragged = prompts(5, 3, 7, 2)
    want = [full_forward_greedy(pondering, prompt, 8, 4) for prompt in ragged]
    plain = Engine(pondering, recurrent_steps=4).complete(requests(ragged), rows=3)
    assert [completion.tokens for completion in plain] == want
    speculation = SelfSpeculation(2, 3)
    engine = Engine(pondering, recurrent_steps=4, speculation=speculation)
    drafted = engine.complete(requests(ragged), rows=3)
    assert [completion.tokens for completion in drafted] == want
    assert 0 < speculation.accepted < speculation.drafted
    engine = Engine(pondering, exit_policy=QExit(0.7))
    together = engine.complete(requests(ragged), rows=2)
    for prompt, completion in zip(ragged, together, strict=True):
        assert completion == engine.complete(requests([prompt]))[0]
        assert len(set(completion.steps)) > 1


def test_the_context_ends_a_row(model):
    got = Engine(model).complete(requests(prompts(CONTEXT - 2, 3), 5))
    assert [(len(c.tokens), c.finish) for c in got] == [(2, "context"), (5, "limit")]


def test_a_stop_token_ends_a_row_and_is_no_part_of_it(model):
    prompt = prompts(5)[0]
    tokens = Engine(model).complete(requests([prompt]))[0].tokens
    cut = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    stop = frozenset([tokens[cut]])
    request = Request(prompt=prompt, max_new_tokens=8, stop_tokens=stop)
    got = Engine(model).complete([request])[0]
    assert (got.tokens, got.finish) == (tokens[:cut], "stop_token")
    assert len(got.steps) == cut


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent_steps": 0}, "recurrent_steps=0 must be at least 1"),
        ({"kv_cache": "lats"}, "kv_cache=lats is unknown; nearest: last"),
        ({"exit_policy": StaticStep(4)}, "exit=static:4 is beyond recurrent_steps=3"),
        ({"speculation": SelfSpeculation(3)}, "draft_step=3 must be at least 1 and below"),
        ({"speculation": SelfSpeculation(1, 0)}, "draft_tokens=0 must be at least 1"),
        ({"speculation": SelfSpeculation(1), "kv_cache": "last"}, "with kv_cache=full only"),
        ({"speculation": SelfSpeculation(1), "exit_policy": QExit(0.5)}, "leave out exit"),
    ],
)
def test_engine_mistakes_are_one_line(model, options, message):
    with pytest.raises(UserError, match=message) as raised:
        Engine(model, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "message"),
    [
        ([], 4, 0.0, "prompt 0 is empty"),
        ([1] * CONTEXT, 4, 0.0, f"prompt 0 has {CONTEXT} tokens, the context of {CONTEXT}"),
        ([1, 128], 4, 0.0, "prompt 0 has token 128, the model's vocabulary has 128"),
        ([1], 0, 0.0, "max_new_tokens=0 must be at least 1"),
        ([1], 4, 1.0, "temperature=1.0 needs a generator"),
    ],
)
def test_request_mistakes_are_one_line(model, prompt, count, temperature, message):
    with pytest.raises(UserError, match=message) as raised:
        Engine(model).complete(
            requests([prompt], count), sampling=Sampling(temperature=temperature)
        )
    assert "\n" not in str(raised.value)


def test_other_kernels_are_refused():
    model = make_model()
    model.layers["0"].attention.inner_attention = torch.nn.Identity()
    with pytest.raises(UserError, match="cannot decode"):
        Engine(model)
