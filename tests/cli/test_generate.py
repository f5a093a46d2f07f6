"""`titan-loop generate` end to end, in this process."""

import io
import json
import re

import pytest

from tests.inference.conftest import byte_level_tokenizer
from tests.support.command_lines import refused
from titan_loop.cli.main import main
from titan_loop.inference.engine import Engine
from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.inference.rows import text_requests
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.chatml import CHAT_TEMPLATE
from titan_loop.text.conversation import Conversation, Turn

NEW = ("--max-new-tokens", "12")


def generate(capsys, *arguments: str) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def expected_text(run, prompt: str, **options) -> str:
    loaded = load_checkpoint(run)
    engine = Engine(loaded.model, recurrent_steps=options.pop("recurrent_steps", 2), **options)
    tokenizer = load_matching_tokenizer(loaded)
    requests = text_requests(
        tokenizer, [prompt], stop_tokens=text_ends(loaded, tokenizer).stop_tokens, max_new_tokens=12
    )
    return engine.complete(requests)[0].text


def test_a_prompt_is_completed_at_the_trained_depth(capsys, trained_run):
    whole = expected_text(trained_run, "def f(")
    flags = ("--stop", whole[4:6], "--seed", str(2**64 - 1))
    out, _ = generate(capsys, trained_run, "--prompt", "def f(", *NEW, *flags)
    assert out == whole[: whole.find(whole[4:6])] + "\n"
    out, err = generate(capsys, trained_run, "--prompt", "def f(", *NEW)
    assert out == expected_text(trained_run, "def f(") + "\n"
    assert re.fullmatch(
        r"\[12 tokens in .* s, mean exit step 2\.00 of 2, cache .* MB \(full\)\]\n", err
    )


def test_steps_are_shown_behind_each_token(capsys, trained_run):
    out, err = generate(
        capsys, trained_run, "--prompt", "a", *NEW, "--show-steps", "--recurrent-steps", "4",
        "--exit", "q:0.6", "--kv-cache", "last",
    )  # fmt: skip
    steps = [
        int(digit.translate(str.maketrans("₁₂₃₄", "1234"))) for digit in re.findall("[₁-₄]", out)
    ]
    assert len(steps) == 12
    assert f"mean exit step {sum(steps) / 12:.2f} of 4" in err
    assert "(last)" in err


def test_several_prompts_run_as_one_batch(capsys, trained_run):
    out, err = generate(capsys, trained_run, "--prompt", "ab", "--prompt", "c", *NEW)
    assert out == "".join(
        f"=== {prompt}\n{expected_text(trained_run, prompt)}\n" for prompt in ("ab", "c")
    )
    assert "[24 tokens" in err


def test_speculation_reports_its_acceptance_and_changes_nothing(capsys, trained_run):
    plain, _ = generate(capsys, trained_run, "--prompt", "ab", *NEW, "--dtype", "float64")
    out, err = generate(
        capsys, trained_run, "--prompt", "ab", *NEW, "--dtype", "float64", "--draft-step", "1"
    )
    assert out == plain
    assert re.search(r"accepted \d+% of the drafts", err)


def test_lines_of_standard_input_are_prompts(capsys, monkeypatch, trained_run):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\nc\n"))
    out, _ = generate(capsys, trained_run, *NEW)
    assert out == "".join(f"{expected_text(trained_run, p)}\n" for p in ("ab", "c"))


def test_a_chat_remembers_its_turns(capsys, monkeypatch, trained_run):
    asked = []
    stream = Engine.stream
    monkeypatch.setattr(
        Engine,
        "stream",
        lambda self, requests, **options: (
            asked.append(requests[0].prompt) or stream(self, requests, **options)
        ),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nyou\n"))
    out, _ = generate(capsys, trained_run, "--chat", "--max-new-tokens", "2", "--context", "200")
    tokenizer = byte_level_tokenizer()
    answer = out.split("\n")[0]
    encoder = ChatEncoder(tokenizer, ChatTemplate())
    first = Turn("user", "hi")
    assert asked[0] == encoder.prompt(Conversation((first,))).ids
    both = Conversation((first, Turn("assistant", answer), Turn("user", "you")))
    assert asked[1] == encoder.prompt(both).ids


def test_a_chat_that_outgrows_the_context_loses_its_oldest_turns(capsys, monkeypatch, trained_run):
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\nthree four\nfive\n"))
    _, said = generate(capsys, trained_run, "--chat", "--max-new-tokens", "2", "--context", "64")
    assert said.count("turns were left out: they no longer fit the context") >= 1
    assert said.count(" tokens in ") == 3  # every question was answered


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--exit", "q:2"), "exit=q:2.0 must be between 0 and 1"),
        (("--temperature", "-1"), "temperature=-1.0 must be 0"),
        (("--max-new-tokens", "0"), "max_new_tokens=0 must be at least 1"),
        (("--seed", str(2**64)), f"seed={2**64} must be between 0 and {2**64 - 1}"),
        (("--top-p", "0.5"), "top_k and top_p have no effect without a --temperature above 0"),
        (("--prompt", "x" * 60), "prompt 0 has 60 tokens, the context of 48"),
        (("--draft-step", "2", "--prompt", "a"), "draft_step=2 must be at least 1 and below"),
        (("--chat", "--prompt", "a", "--prompt", "b"), "--chat takes one --prompt"),
    ],
)
def test_mistakes_are_one_line(capsys, trained_run, flags, message):
    assert message in refused(capsys, "generate", trained_run, *flags)


def test_what_ended_a_completion_and_what_chats_are_worth_is_said(capsys, trained_run, own_run):
    _, err = generate(capsys, trained_run, "--prompt", "a", "--max-new-tokens", "40")
    assert "[ended at the context of" not in err
    _, err = generate(
        capsys, trained_run, "--prompt", "a", "--max-new-tokens", "40", "--context", "9"
    )
    assert "[ended at the context of 9 tokens, by default the trained window; --context" in err
    _, err = generate(capsys, trained_run, "--prompt", "Hello", "--chat", *NEW)
    assert "[this model was not trained on conversations" in err
    path = own_run / "config.json"  # of a model whose turns end as its documents do
    text = {"chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps({**json.loads(path.read_text()), "text": text}))
    _, err = generate(capsys, own_run, "--prompt", "Hello", "--chat", *NEW)
    assert "conversations" not in err


def test_an_empty_prompt_begins_a_text(capsys, trained_run):
    loaded = load_checkpoint(trained_run)
    tokenizer = load_matching_tokenizer(loaded)
    begin = text_ends(loaded, tokenizer).end_of_text
    assert begin is not None
    out, _ = generate(capsys, trained_run, "--prompt", "", *NEW)
    assert out == expected_text(trained_run, [begin]) + "\n"
