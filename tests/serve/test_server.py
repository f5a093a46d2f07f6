"""OpenAI's own client, unmodified, against a real server on this machine."""

import http.client
import json
import os
import sys
import threading
from urllib.parse import urlsplit

import openai
import pytest

from tests.serve.conftest import CONTEXT, Answer, Running, running, until
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit
from titan_loop.inference.rows import Request, text_requests
from titan_loop.inference.sampling import Sampling
from titan_loop.serve.rows import RowSettings
from titan_loop.text.conversation import Conversation, Turn

PROMPT = "def f("
GREEDY = {"model": "run", "temperature": 0.0}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(server: Running, prompt=PROMPT, *, steps=2, exit_policy=None, count=12, **options):
    model, served = server.served.scheduler.engine.stack.model, server.served
    engine = Engine(model, recurrent_steps=steps, exit_policy=exit_policy)
    seeds = [options["seed"]] if "seed" in options else None
    requests = text_requests(
        served.encoding_tokenizer,
        [prompt],
        stop_tokens=served.ends.stop_tokens,
        max_new_tokens=count,
        stop=options.get("stop", ()),
        seeds=seeds,
    )
    return engine.complete(requests, sampling=options.get("sampling"))[0]


def ask(server: Running, method: str, path: str, body=None, **headers: str):
    """Ask without any client's help; return status, headers and text."""
    link = http.client.HTTPConnection(urlsplit(server.url).netloc)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body)
    link.request(method, path, content, {"Content-Type": "application/json", **headers})
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, answer.headers, text


def test_a_completion_is_what_the_engine_writes_and_its_steps_are_told(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.recurrent_steps, model.most_recurrent_steps) == ("run", 2, 4)
    assert client.models.retrieve("run") == model
    answer = client.completions.create(prompt=[PROMPT], max_tokens=12, **GREEDY)
    whole = expected(server)
    assert answer.choices[0].text == whole.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].exit_steps == [2] * 12
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 12, 18)
    deep = client.completions.create(
        prompt=PROMPT, max_tokens=12, extra_body={"exit": "q:0.7", "recurrent_steps": 4}, **GREEDY
    )
    whole = expected(server, steps=4, exit_policy=QExit(0.7))
    assert (deep.choices[0].text, deep.choices[0].exit_steps) == (whole.text, whole.steps)
    assert deep.usage.mean_exit_step == sum(whole.steps) / 12
    assert deep.usage.cache_bytes == 2 * usage.cache_bytes


def test_a_stream_adds_up_to_the_whole(server, client):
    options = {"prompt": PROMPT, "max_tokens": 12, "extra_body": {"exit": "q:0.5"}, **GREEDY}
    whole = client.completions.create(**options)
    stream = client.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    steps = [step for chunk in chunks for step in chunk.choices[0].exit_steps]
    assert steps == whole.choices[0].exit_steps
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert last.usage == whole.usage
    assert not last.choices


def test_a_chat_is_written_in_the_template_of_the_model(server, client):
    turns = (Turn("user", "hi"), Turn("assistant", "yes"), Turn("user", "you"))
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    ids = server.served.encoder.prompt(Conversation(turns)).ids
    whole = expected(server, ids, count=5)
    options = {"messages": messages, "max_completion_tokens": 5, **GREEDY}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == whole.text
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **options)
    ]
    assert "".join(delta.content for delta in deltas) == whole.text
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * 4


def test_stops_seeds_and_prompts(server, client):
    free = expected(server)
    stop = free.text[4:6]
    answer = client.completions.create(prompt=PROMPT, max_tokens=12, stop=[stop], **GREEDY)
    assert answer.choices[0].text == free.text[: free.text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    warm = {"model": "run", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.9, "top_p": 0.8}
    sampling = Sampling(temperature=0.9, top_p=0.8)
    answer = client.completions.create(seed=7, **warm)
    assert answer.choices[0].text == expected(server, sampling=sampling, count=8, seed=7).text
    texts = {client.completions.create(**warm).choices[0].text for _ in range(3)}
    assert len(texts) == 3  # without a seed; 300 tokens to the power of 8 would have to meet
    of_ids = client.completions.create(prompt=[5, 6], max_tokens=4, **GREEDY)
    assert of_ids.choices[0].text == expected(server, [5, 6], count=4).text
    assert of_ids.usage.prompt_tokens == 2
    begun = client.completions.create(prompt="", max_tokens=4, **GREEDY)
    assert begun.choices[0].text == expected(server, [0], count=4).text


def test_an_end_token_is_no_part_of_an_answer(ended_run):
    with (
        running(ended_run.path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client,
    ):
        answer = client.completions.create(
            prompt=ended_run.prompt, model="run", temperature=0, logprobs=0
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert len(choice.exit_steps) == len(choice.logprobs.tokens) == len(ended_run.tokens)
    assert answer.usage.completion_tokens == len(ended_run.tokens)


def test_log_probabilities_stand_beside_their_tokens(server, client):
    answer = client.completions.create(prompt=PROMPT, max_tokens=4, logprobs=3, **GREEDY)
    told = answer.choices[0].logprobs
    assert [max(each.values()) for each in told.top_logprobs] == told.token_logprobs
    assert told.text_offset == [0, 1, 2, 3]
    assert [len(each) for each in told.top_logprobs] == [3] * 4  # half characters, too
    warm = {"model": "run", "prompt": PROMPT, "temperature": 2.0, "logprobs": 1}
    (choice,) = client.completions.create(seed=4, max_tokens=6, **warm).choices
    told = choice.logprobs
    owns = zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True)
    assert all(each[token] == own for token, own, each in owns)
    messages = [{"role": "user", "content": "hi"}]
    options = {"messages": messages, "max_tokens": 3, "logprobs": True, **GREEDY}
    answer = client.chat.completions.create(top_logprobs=2, **options)
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 2
        assert len(token.bytes) == 1  # this tokenizer's tokens are bytes
        assert token.logprob == token.top_logprobs[0].logprob < 0
    with_trace = client.completions.create(
        prompt=PROMPT, max_tokens=4, extra_body={"trace": True}, **GREEDY
    )
    for steps in with_trace.choices[0].trace:
        assert [len(step["likely"]) for step in steps] == [5, 5]
        assert 0 < sum(step["exit"] for step in steps) <= 1


TEXT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        ([], 400, "the body is not a JSON object"),
        (TEXT | {"model": "../run"}, 404, "model='../run' is not served here; it is 'run'"),
        (TEXT | {"stream_options": {"include_usge": True}}, 400, "include_usge is not a field of"),
        (TEXT | {"top_pp": 1}, 400, "top_pp is not a field of this request; nearest: top_p"),
        (TEXT | {"presence_penalty": 0.5}, 400, "presence_penalty=0.5 is not supported here"),
        (TEXT | {"temperature": "hot"}, 400, 'temperature="hot" must be a whole number or a num'),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature=nan must be 0"),
        (TEXT | {"temperature": 10**400}, 400, "temperature is too large"),
        (TEXT | {"max_tokens": True}, 400, "max_tokens=true must be a whole number"),
        (TEXT | {"max_tokens": 2000}, 400, "max_tokens=2000 is above this server's limit of 1024"),
        (TEXT | {"seed": 2**63}, 400, f"seed={2**63} must be between"),
        (TEXT | {"n": 2}, 400, "n=2 is not supported here"),
        (TEXT | {"prompt": ["a", "b"]}, 400, "prompt must be one text, or one list of token ids"),
        (TEXT | {"prompt": [300]}, 400, "the model's vocabulary has 300"),
        (TEXT | {"prompt": "x" * CONTEXT}, 400, f"has {CONTEXT} tokens, the context of {CONTEXT}"),
        (b'{"prompt": "\\ud800"}', 400, "prompt holds half of a surrogate pair"),
        (TEXT | {"stop": [""]}, 400, "stop must be at most 16 texts, none of them empty"),
        (TEXT | {"exit": "q:2"}, 400, "exit=q:2.0 must be between 0 and 1"),
        (TEXT | {"exit": "static:3"}, 400, "exit=static:3 is beyond recurrent_steps=2"),
        (TEXT | {"recurrent_steps": 5}, 400, "above the 4 that this server has memory for"),
        (CHAT | {"messages": []}, 400, "messages must be at least one message"),
        (CHAT | {"messages": [{"role": "cat"}]}, 400, "a message has the role 'cat'"),
        (CHAT | {"tools": [{"type": "function"}]}, 400, "is not supported here; leave it out"),
        (CHAT | {"top_logprobs": 2}, 400, "top_logprobs needs logprobs=true"),
        (b'"' + b"x" * (1 << 20), 413, "the body has over 1048576 bytes"),
    ],
)
def test_mistakes_are_one_sentence_in_openais_form(server, body, status, words):
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else None
    got, _, text = ask(server, "POST", path or "/v1/completions", body)
    assert got == status
    error = json.loads(text)["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_other_pages_and_paths_get_nothing(server):
    status, _, text = ask(server, "POST", "/v1/completions", TEXT, **{"Content-Type": "text/plain"})
    assert (status, "must be application/json" in text) == (415, True)
    assert ask(server, "GET", "/v1/models", Host="elsewhere.example")[0] == 400
    assert ask(server, "GET", "/v1/completions")[0] == 405
    assert ask(server, "PATCH", "/v1/answers/none", {"exit": "full"})[0] == 404
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes):
            opened.append(os.fsdecode(arguments[0]))

    sys.addaudithook(watch)
    for path in ("/../run/config.json", "/v1/models/..%2f..%2fetc%2fpasswd", "/etc/passwd", "//x"):
        assert ask(server, "GET", path)[0] == 404
    assert ask(server, "POST", "/v1/completions", TEXT | {"max_tokens": 2})[0] == 200
    watching = False
    assert not opened


def test_the_page_is_one_file_that_asks_nobody_else(server):
    status, headers, text = ask(server, "GET", "/")
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert text.startswith("<!doctype html>")
    assert "://" not in text


def test_a_key_is_asked_for(trained_run):
    with running(trained_run, api_key="seçret") as server:
        assert ask(server, "GET", "/health")[0] == 200
        for path in ("/v1/models", "/metrics"):
            status, headers, _ = ask(server, "GET", path, Authorization="Bearer wrong")
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError, match="key is missing or wrong"),
        ):
            client.completions.create(prompt="a", model="run")
        key = "seçret".encode().decode("latin-1")
        assert ask(server, "GET", "/v1/models", Authorization=f"Bearer {key}")[0] == 200


def held(server: Running, gate: threading.Event) -> Answer:
    """Take one of the server's places, and stop its engine after a token until `gate` is set."""
    answer = Answer(
        server.served.scheduler.engine,
        Request(prompt=[1], max_new_tokens=2),
        RowSettings(recurrent_steps=1),
        on_token=lambda _: gate.wait() and None,
    )
    server.served.scheduler.submit([answer.row])
    until(lambda: bool(answer.pieces))
    return answer


def test_a_full_queue_is_429_and_leaving_frees_rows(trained_run):
    gate = threading.Event()
    with running(trained_run, rows=1, queue=1) as server:
        metrics = server.served.scheduler.metrics
        held(server, gate)
        link = http.client.HTTPConnection(urlsplit(server.url).netloc)
        long = {"prompt": "a", "max_tokens": 400, "stream": True, "temperature": 0}
        link.request(
            "POST", "/v1/completions", json.dumps(long), {"Content-Type": "application/json"}
        )
        waits = "titan_loop_queue 1.0"
        until(lambda: waits in metrics.text().decode())
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError, match="there is no room for 1 more") as error:
                client.completions.create(prompt="a", model="run")
            assert error.value.response.headers["retry-after"] == "1"
            link.close()  # it waits still: its place in the queue is free again
            until(lambda: 'answers_total{ended="gone"} 1.0' in metrics.text().decode())
            gate.set()
            stream = client.completions.create(stream=True, **long_of(client))
            next(iter(stream))
            stream.close()  # it runs
            until(lambda: 'answers_total{ended="gone"} 2.0' in metrics.text().decode())
            until(lambda: "titan_loop_rows 0.0" in metrics.text().decode())
            with pytest.raises(openai.APITimeoutError):  # one that is not streamed leaves as well
                client.completions.create(timeout=0.05, **long_of(client))
            until(lambda: 'answers_total{ended="gone"} 3.0' in metrics.text().decode())


def long_of(client) -> dict:
    # Greedy, since a drawn token may end the text.
    asked = {"model": "run", "prompt": "a", "max_tokens": 500, "temperature": 0}
    return {**asked, "extra_body": {"recurrent_steps": 4}}


def test_an_answer_changes_while_it_is_written(server, client):
    stream = client.completions.create(
        prompt=PROMPT, max_tokens=400, stream=True, extra_body={"exit": "static:1"}, **GREEDY
    )
    steps = []
    for chunk in stream:
        if not steps:
            path = f"/v1/answers/{chunk.id}"
            assert ask(server, "PATCH", path, {"recurrent_steps": 9})[0] == 400
            assert ask(server, "PATCH", path, {"seed": 1})[0] == 400
            assert ask(server, "PATCH", path, {"recurrent_steps": 4, "exit": "full"})[0] == 204
        steps += chunk.choices[0].exit_steps
        if 4 in steps:
            break
    stream.close()
    assert 0 < len(steps) < 400
    assert steps == sorted(steps)
    assert {*steps} == {1, 4}
    until(lambda: ask(server, "PATCH", path, {"exit": "full"})[0] == 404)
