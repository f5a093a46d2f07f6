"""Rows that share the engine get the tokens they would get alone, and free their places."""

import threading

import pytest
import torch

from tests.inference.conftest import byte_level_tokenizer
from tests.inference.reference import make_model, prompts
from tests.serve.conftest import Answer, until
from titan_loop.errors import UserError
from titan_loop.inference.detokenizer import Detokenizer
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import (
    Confidence,
    KLAndEntropy,
    QExit,
    SampledExit,
    StaticStep,
)
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling
from titan_loop.objectives.exit_distribution import exit_pmf
from titan_loop.serve.answering import Answering
from titan_loop.serve.rows import LogProbs, RefusedError, RowSettings, ServingEngine
from titan_loop.serve.scheduler import Scheduler

WARM = Sampling(temperature=0.8, top_p=0.9)
MIXED = [
    RowSettings(recurrent_steps=4),
    RowSettings(recurrent_steps=3, exit_policy=QExit(0.7)),
    RowSettings(recurrent_steps=4, exit_policy=QExit(0.7), sampling=WARM, traced=True),
    RowSettings(recurrent_steps=2, exit_policy=Confidence(0.055), logprobs=3),
    RowSettings(recurrent_steps=4, exit_policy=KLAndEntropy(0.2, 4.5), sampling=WARM),
    RowSettings(recurrent_steps=1, sampling=Sampling(temperature=1.5, top_k=7)),
    RowSettings(recurrent_steps=4, exit_policy=SampledExit(), sampling=WARM),
]


@pytest.fixture(scope="module")
def model():
    return make_model().double()


def scheduler_of(model, *, rows: int = 3, queue: int = 64, kv_cache: str = "full") -> Scheduler:
    engine = ServingEngine(model, recurrent_steps=4, kv_cache=kv_cache)
    return Scheduler(engine, rows=rows, queue=queue)


@pytest.mark.parametrize("kv_cache", ["full", "last", "first", "averaged"])
def test_rows_of_all_settings_write_what_they_write_alone(model, kv_cache):
    """Seven rows share three places; each has its own depth, policy and sampling, in float64."""
    scheduler = scheduler_of(model, kv_cache=kv_cache)
    given = prompts(5, 2, 9, 4, 7, 3, 6)
    answers = [
        Answer(scheduler.engine, Request(prompt=prompt, max_new_tokens=8), settings, seed=seed)
        for seed, (prompt, settings) in enumerate(zip(given, MIXED, strict=True))
    ]
    scheduler.submit([answer.row for answer in answers])
    until(lambda: all(answer.is_done for answer in answers))
    scheduler.join()
    for seed, (answer, prompt, settings) in enumerate(zip(answers, given, MIXED, strict=True)):
        alone = Engine(
            model,
            recurrent_steps=settings.recurrent_steps,
            kv_cache=kv_cache,
            exit_policy=settings.exit_policy,
        )
        request = Request(prompt=prompt, max_new_tokens=8, seed=seed)
        (expected,) = alone.complete([request], sampling=settings.sampling)
        assert (answer.tokens, answer.steps) == (expected.tokens, expected.steps)
    assert len({step for answer in answers for step in answer.steps}) == 4


@torch.no_grad()
def test_traces_and_log_probabilities_are_those_of_the_full_forward_pass(model):
    scheduler = scheduler_of(model)
    (prompt,) = prompts(6)
    settings = RowSettings(recurrent_steps=4, exit_policy=QExit(0.8), logprobs=2, traced=True)
    answer = Answer(scheduler.engine, Request(prompt=prompt, max_new_tokens=3), settings)
    scheduler.submit([answer.row])
    until(lambda: answer.is_done)
    scheduler.join()
    first, *others = answer.pieces
    assert first.event is not None
    assert len(first.trace) == first.event.step < 4
    output = model(torch.tensor([prompt]), recurrent_steps=4)
    pmf = exit_pmf(torch.stack([*output.exit_logit_RBL]))[:, 0, -1]
    for step, reading in enumerate(first.trace):
        shares = model.readout(output.hidden_RBLD[step])[0, -1].softmax(-1)
        tokens, values = zip(*reading.likely, strict=True)
        assert list(tokens) == shares.topk(5).indices.tolist()
        assert list(values) == pytest.approx(shares.topk(5).values.tolist())
        assert reading.exit_probability == pytest.approx(float(pmf[step]))
    read = model.readout(output.hidden_RBLD[first.event.step - 1])[0, -1].log_softmax(-1)
    assert first.logprobs is not None
    assert first.logprobs.own == pytest.approx(float(read[first.event.token]))
    assert [token for token, _ in first.logprobs.likely] == read.topk(2).indices.tolist()
    cost = model.config.training_flops(len(prompt), first.event.step, trainable="exit_gate")
    readout = 2 * model.config.dim * (model.config.vocab_size + first.event.step)
    assert first.flops == cost.matrices + cost.attention + readout
    for piece in others:
        assert piece.event is not None
        assert piece.trace[0] != first.trace[0]
        assert piece.trace[-1].likely[0][0] == piece.event.token  # greedy
        assert len(piece.trace) == piece.event.step
        assert 0.8 <= sum(each.exit_probability or 0 for each in piece.trace) < 1


def test_changed_settings_apply_from_the_next_token_on(model):
    scheduler = scheduler_of(model)

    def change(answer: Answer) -> None:
        wanted = {3: RowSettings(recurrent_steps=4), 6: settings_of_one_step}
        answer.row.wanted = wanted.get(len(answer.pieces), answer.row.wanted)

    settings_of_one_step = RowSettings(recurrent_steps=4, exit_policy=StaticStep(1))
    request = Request(prompt=prompts(5)[0], max_new_tokens=9)
    answer = Answer(scheduler.engine, request, RowSettings(recurrent_steps=2), on_token=change)
    scheduler.submit([answer.row])
    until(lambda: answer.is_done)
    scheduler.join()
    assert answer.steps == [2, 2, 2, 4, 4, 4, 1, 1, 1]
    alone = Engine(model, recurrent_steps=2).complete([request])
    assert answer.tokens[:3] == alone[0].tokens[:3]


def test_deeper_steps_than_the_prompt_ran_see_its_last_one(model):
    scheduler = scheduler_of(model)

    def deepen(answer: Answer) -> None:
        answer.row.wanted = RowSettings(recurrent_steps=4)

    prompt = prompts(5)[0]
    request = Request(prompt=prompt, max_new_tokens=9)
    answer = Answer(scheduler.engine, request, RowSettings(recurrent_steps=2), on_token=deepen)
    scheduler.submit([answer.row])
    until(lambda: answer.is_done)
    scheduler.join()
    engine = Engine(model, recurrent_steps=4, prefill_steps=2)
    request = Request(prompt=[*prompt, answer.tokens[0]], max_new_tokens=8)
    assert answer.tokens[1:] == engine.complete([request])[0].tokens


def test_text_that_may_begin_a_stop_string_is_not_lost_when_time_is_up(model):
    tokenizer = byte_level_tokenizer()
    request = Request(prompt=[1], text=Detokenizer(tokenizer, ["bc"]))
    engine = ServingEngine(model, recurrent_steps=4)
    answer = Answer(engine, request, RowSettings(recurrent_steps=4))
    for token in tokenizer.encode("ab").ids:
        answer.row.accept(token, 4)
    answer.row.end("time")
    kind = Answering("chat", answer.row, model="m", tokenizer=tokenizer, engine=engine)
    (choice,) = kind.whole(answer.pieces)[1]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "length")


def test_offsets_are_those_of_the_text(model):
    """Half a character and a special token take no place in it."""
    tokenizer = byte_level_tokenizer()
    engine = ServingEngine(model, recurrent_steps=4)
    request = Request(prompt=[1], text=Detokenizer(tokenizer))
    answer = Answer(engine, request, RowSettings(recurrent_steps=4))
    answer.row.logprobs = LogProbs(-1.0, [])
    for token in tokenizer.encode("a<|im_start|>éb").ids:
        answer.row.accept(token, 4)
    kind = Answering("completion", answer.row, model="m", tokenizer=tokenizer, engine=engine)
    (choice,) = kind.whole(answer.pieces)[1]["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("aéb", [0, 1, 1, 1, 2])


class _Gate:
    """Holds the engine before each token until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, answer: Answer) -> None:
        self.open.wait()


def test_the_queue_is_bounded_and_rows_that_leave_make_room(model):
    scheduler = scheduler_of(model, rows=1, queue=1)
    gate = _Gate()

    def ask(**options) -> Answer:
        request = Request(prompt=[1, 2], max_new_tokens=5)
        return Answer(scheduler.engine, request, RowSettings(recurrent_steps=2), **options)

    first, second, third = ask(on_token=gate), ask(), ask()
    scheduler.submit([first.row])
    until(lambda: bool(first.pieces))  # it runs, and the engine waits
    scheduler.submit([second.row])
    with pytest.raises(RefusedError, match="1 answers are being written and 1 wait"):
        scheduler.submit([third.row])
    scheduler.cancel([second.row])
    scheduler.submit([third.row])
    third.row.wanted = RowSettings(recurrent_steps=4)  # it waits still
    scheduler.cancel([first.row])
    gate.open.set()
    until(lambda: third.is_done)
    assert len(first.pieces) == 2  # the token in progress, and the end
    assert first.pieces[-1].problem == "gone"
    assert not second.pieces
    assert third.steps == [4] * 5
    scheduler.join()
    with pytest.raises(RefusedError, match="the server is stopping"):
        scheduler.submit([ask().row])
    text = scheduler.metrics.text().decode()
    for line in ('answers_total{ended="gone"} 2.0', 'answers_total{ended="refused"} 1.0',
                 'answers_total{ended="length"} 1.0', "loop_tokens_total 6.0",
                 "exit_steps_total 22.0", "loop_rows 0.0", "loop_queue 0.0"):  # fmt: skip
        assert f"{line}\n" in text


def test_a_client_with_its_last_token_may_ask_again_at_once(model):
    scheduler = scheduler_of(model, rows=1, queue=0)
    request, settings = Request(prompt=[1, 2], max_new_tokens=3), RowSettings(recurrent_steps=2)
    second = Answer(scheduler.engine, request, settings)
    first = Answer(
        scheduler.engine,
        request,
        settings,
        on_token=lambda answer: answer.is_done and scheduler.submit([second.row]),
    )
    scheduler.submit([first.row])
    until(lambda: second.is_done)
    scheduler.join()
    assert second.tokens == first.tokens


def test_time_ends_rows_that_run_and_rows_that_wait(model):
    scheduler = scheduler_of(model, rows=1)
    request = Request(prompt=[1, 2], max_new_tokens=40)
    settings = RowSettings(recurrent_steps=2)
    gate = _Gate()
    running = Answer(scheduler.engine, request, settings, on_token=gate, seconds=0.5)
    scheduler.submit([running.row])
    until(lambda: bool(running.pieces))
    waiting = Answer(scheduler.engine, request, settings, seconds=-1)
    scheduler.submit([waiting.row])
    threading.Timer(0.6, gate.open.set).start()
    until(lambda: running.is_done and waiting.is_done)
    assert (running.pieces[-1].problem, len(running.tokens)) == ("time", 1)
    assert (waiting.pieces[-1].problem, waiting.tokens) == ("time", [])
    scheduler.join()


def test_closing_ends_what_waits_and_lets_what_runs_finish(model):
    scheduler = scheduler_of(model, rows=1)
    request, settings = Request(prompt=[1, 2], max_new_tokens=6), RowSettings(recurrent_steps=2)
    gate = _Gate()
    running = Answer(scheduler.engine, request, settings, on_token=gate)
    scheduler.submit([running.row])
    until(lambda: bool(running.pieces))
    waiting = Answer(scheduler.engine, request, settings)
    scheduler.submit([waiting.row])
    scheduler.close()
    assert waiting.pieces[0].problem == "stopping"
    gate.open.set()
    scheduler.join()
    assert len(running.tokens) == 6


def test_a_failure_gives_up_its_rows_and_not_the_engine(model, monkeypatch, caplog):
    scheduler = scheduler_of(model, rows=2)
    request, settings = Request(prompt=[1, 2], max_new_tokens=6), RowSettings(recurrent_steps=2)
    step = scheduler.engine.stack.step
    fails = iter([False, False, False, True])
    monkeypatch.setattr(
        scheduler.engine.stack,
        "step",
        lambda *args, **options: 1 / 0 if next(fails, False) else step(*args, **options),
    )
    both = [Answer(scheduler.engine, request, settings) for _ in range(2)]
    scheduler.submit([answer.row for answer in both])
    until(lambda: all(answer.is_done for answer in both))
    assert [answer.pieces[-1].problem for answer in both] == ["failure", "failure"]
    again = Answer(scheduler.engine, request, settings)
    scheduler.submit([again.row])
    until(lambda: again.is_done)
    scheduler.join()
    assert again.tokens == Engine(model, recurrent_steps=2).complete([request])[0].tokens
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("settings", "prompt", "words"),
    [
        (RowSettings(recurrent_steps=5), [1], "above the 4 that this server has memory for"),
        (RowSettings(recurrent_steps=2, exit_policy=StaticStep(3)), [1], "exit=static:3 is beyond"),
        (RowSettings(recurrent_steps=2), [], "the prompt is empty"),
        (RowSettings(recurrent_steps=2), [128], "the model's vocabulary has 128"),
    ],
)
def test_rows_that_cannot_run_are_refused_before_they_wait(model, settings, prompt, words):
    engine = ServingEngine(model, recurrent_steps=4)
    with pytest.raises(UserError, match=words):
        engine.check(settings, prompt)
