"""The harness' model: the three kinds of requests against plain computations, caches, bad input."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.inference.conftest import byte_level_tokenizer
from tests.inference.reference import CONTEXT
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR, UserError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.harness_model import LoopLM
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit
from titan_loop.inference.loading import load_checkpoint
from titan_loop.inference.rows import text_requests
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.conversation import Conversation, parse_messages

END = 0
TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def ask(*requests: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(task_name="a", args=request) for request in requests]


def nats(run: Path, tokens: list[int], first: int, *, steps: int) -> float:
    """Nats of tokens[first:] behind what stands before them."""
    model = load_checkpoint(run).model
    with torch.no_grad():
        inputs = torch.tensor([tokens[:-1]])
        hidden = model(inputs, recurrent_steps=steps, collect="last").hidden_RBLD[0]
        log_prob = model.readout(hidden).double().log_softmax(-1)[0]
    return -sum(float(log_prob[i - 1, tokens[i]]) for i in range(first, len(tokens)))


def test_log_likelihoods(trained_run: Path):
    lm = LoopLM(trained_run, recurrent_steps=3)
    tokenizer = byte_level_tokenizer()
    (score, _), (alone, _), (again, _) = lm.loglikelihood(
        ask(("def f(", "x):"), ("", "x):"), ("def f(", "x):"))
    )
    prompt, answer = tokenizer.encode("def f(").ids, tokenizer.encode("x):").ids
    assert score == pytest.approx(-nats(trained_run, [*prompt, *answer], 6, steps=3), abs=1e-4)
    assert alone == pytest.approx(-nats(trained_run, [END, *answer], 1, steps=3), abs=1e-4)
    assert again == score
    assert lm.count.mean == 3.0


def test_rolling_windows_predict_every_token_once(trained_run: Path):
    lm = LoopLM(trained_run)
    (score,) = lm.loglikelihood_rolling(ask((TEXT,)))
    tokens = byte_level_tokenizer().encode(TEXT).ids
    assert CONTEXT < len(tokens) < 2 * CONTEXT
    first = nats(trained_run, [END, *tokens[:CONTEXT]], 1, steps=2)
    rest = len(tokens) - CONTEXT
    second = nats(trained_run, tokens[-CONTEXT - 1 :], CONTEXT + 1 - rest, steps=2)
    assert score == pytest.approx(-(first + second), abs=1e-3)


def test_generation_is_the_engines(trained_run: Path):
    lm = LoopLM(trained_run, recurrent_steps=4, exit="q:0.6", kv_cache="last", batch_size=2)
    options = {"until": ["\n"], "max_gen_toks": 9, "do_sample": False}
    prompts = ("def f(", "a", "import")
    texts = lm.generate_until(ask(*((prompt, options) for prompt in prompts)))
    loaded = load_checkpoint(trained_run)
    engine = Engine(loaded.model, recurrent_steps=4, kv_cache="last", exit_policy=QExit(0.6))
    requests = text_requests(
        byte_level_tokenizer(),
        prompts,
        stop_tokens=frozenset((END,)),
        max_new_tokens=9,
        stop=["\n"],
    )
    expected = engine.complete(requests)
    assert texts == [completion.text for completion in expected]
    steps = [step for completion in expected for step in completion.steps]
    assert lm.count.mean == pytest.approx(sum(steps) / len(steps))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_context_of_white_space_is_an_empty_one(trained_run: Path, batch_size: int):
    """Its white space moves into the continuation; nothing may be read from a neighbour's row."""
    lm = LoopLM(trained_run, batch_size=batch_size)
    blank, empty, *_ = lm.loglikelihood(
        ask(("\n\n", "import os"), ("", "\n\nimport os"), ("a", "b"), (TEXT[:30], "long"))
    )
    assert blank == empty
    assert blank[0] == pytest.approx(
        LoopLM(trained_run).loglikelihood(ask(("\n\n", "import os")))[0][0]
    )
    answer = byte_level_tokenizer().encode("\n\nimport os").ids
    assert -blank[0] == pytest.approx(nats(trained_run, [END, *answer], 1, steps=2), abs=1e-4)
    assert lm.loglikelihood(ask((" ", "x"))) == lm.loglikelihood(ask(("", " x")))


def test_the_seed_of_the_harness_and_the_row_decide_a_sample(trained_run: Path):
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}
    prompts = [("def f(", options)] * 4 + [("a", options), (TEXT[:40], options)]

    def sample(seed: int, batch_size: int) -> list[str]:
        torch.manual_seed(seed)
        return LoopLM(trained_run, batch_size=batch_size).generate_until(ask(*prompts))

    texts = sample(0, 2)
    assert len(set(texts[:4])) == 4  # 300 equally likely tokens: no chance to agree twelve times
    assert sample(0, 1) == sample(0, 5) == texts
    assert not set(sample(77, 2)) & set(texts)


def test_options_of_generation(trained_run: Path, caplog):
    lm = LoopLM(trained_run)

    def generate(**options: object) -> str:
        return lm.generate_until(ask(("def f(", {"until": [], **options})))[0]

    short = generate(max_gen_toks=3)
    for name in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert generate(**{name: 3}) == short
    assert generate(max_gen_toks=3, num_beams=1, repetition_penalty=1.0, use_cache=True) == short
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    generate()
    assert "1 of 1 answers ended at the context of 48 tokens" in caplog.text
    for options, message in (
        ({"num_beams": 4}, "num_beams=4 is not an option of this engine"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 is not an option"),
        ({"suppress_tokens": [3]}, "suppress_tokens=.3. is not an option"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be at least 1"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0 with do_sample=true"),
        ({"do_sample": True, "top_p": 0.0}, "top_p=0.0 must be above 0"),
    ):
        with pytest.raises(UserError, match=message):
            generate(**options)


def test_conversations_are_asked_as_in_training(trained_run: Path):
    """The header stands apart from the answer, and a prefix of the answer does not."""
    lm = LoopLM(trained_run)
    tokenizer = byte_level_tokenizer()
    history = [{"role": "system", "content": "S"}, {"role": "user", "content": "a<|im_end|>"}]
    prompt = lm.apply_chat_template(history)
    assert prompt.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n")
    encoder = ChatEncoder(tokenizer, ChatTemplate())
    turns = parse_messages(history)
    ids = encoder.prompt(Conversation(tuple(turns))).ids
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 2  # the one that is spelt is text
    assert lm.tok_encode(prompt) == ids
    assert lm._encode_pair(prompt, "x y") == (ids, tokenizer.encode("x y").ids)
    ((score, _),) = lm.loglikelihood(ask((prompt, "x y")))
    whole = [*ids, *tokenizer.encode("x y").ids]
    assert -score == pytest.approx(nats(trained_run, whole, len(ids), steps=2), abs=1e-4)

    begun = [*history, {"role": "assistant", "content": "The answer is "}]
    prefix = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert prefix == f"{prompt}The answer is"
    context, answer = lm._encode_pair(prefix, " x")
    assert (context[: len(ids)], [*context[len(ids) :], *answer]) == (
        ids,
        tokenizer.encode("The answer is x").ids,
    )
    assert lm.chat_template(True) == CHAT_TEMPLATE
    assert lm.tokenizer_name == LoopLM(trained_run).tokenizer_name


def test_long_prompts_lose_their_beginning_with_one_warning(trained_run: Path, caplog):
    lm = LoopLM(trained_run)
    (score, _), _ = lm.loglikelihood(ask((TEXT, " x"), (TEXT[:10], " x")))
    tokens = byte_level_tokenizer().encode(TEXT + " x").ids[-CONTEXT - 1 :]
    expected = nats(trained_run, tokens, CONTEXT - 1, steps=2)
    assert score == pytest.approx(-expected, abs=1e-4)
    assert [record.message for record in caplog.records if "beginning" in record.message] == [
        "1 prompts are longer than the context of 48 tokens and lost their beginning; raise "
        "max_length or use fewer shots"
    ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("Tasks not found: toyy"), "toyy; `titan-loop lm_eval ls tasks` lists them"),
        (ConnectionError("nobody\nanswers"), "the Hugging Face hub, which cannot be reached"),
    ],
)
def test_what_the_harness_command_raises_is_one_line(
    monkeypatch, capsys, error: Exception, message: str
):
    def fail() -> None:
        raise error

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    assert main(["lm-eval", "--tasks", "toyy"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit": "q:1.5"}, "between 0 and 1"),
        ({"recurrent_steps": 0}, "recurrent_steps=0 must be a whole number of at least 1"),
        ({"recurent_steps": 2}, "recurent_steps=2 is unknown; nearest: recurrent_steps"),
        ({"pretrained": "x"}, "pretrained=x is unknown; give checkpoint=RUN"),
        ({"trust_remote_code": True}, "a checkpoint has no code"),
        ({"device": "tpu"}, "device=tpu is unknown"),
        ({"prefill_steps": 9}, "prefill_steps=9 is above the"),
        ({"batch_size": "auto"}, "batch_size=auto must be a whole number"),
        ({"max_batch_size": 64}, "max_batch_size=64 has no effect"),
    ],
)
def test_bad_arguments_are_one_line(trained_run: Path, options: dict, message: str):
    with pytest.raises(UserError, match=message) as raised:
        LoopLM(trained_run, **options)
    assert "\n" not in str(raised.value)


def test_another_tokenizer_or_no_checkpoint(trained_run: Path, own_run: Path, tmp_path: Path):
    other = byte_level_tokenizer()
    other.add_tokens(["zz"])
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="is not the one"):
        LoopLM(trained_run, tokenizer=str(tmp_path / "other.json"))
    mano = TaskOptions(tasks=("mano",), tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="is not the one"):
        evaluate_tasks(trained_run, mano)
    with pytest.raises(UserError, match="checkpoint is missing"):
        LoopLM()
    (own_run / "checkpoints" / "step-5" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        LoopLM(own_run / "checkpoints" / "step-5")
