"""Prompts of a file: verifiers, refusals, and a run on them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import processors

from tests.inference.conftest import byte_level_tokenizer
from tests.rl.test_run import records, reward_config
from tests.support.tiny import train_run
from titan_loop.data.tasks.prompt_file import PromptFile, exact, numeric
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.text_format import TextFormat


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    return str(path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1), "most": n + 1} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("verifier", "right", "answer", "reward"),
    [
        (exact, "56", " 56\n", 1),
        (exact, "56", "It is 56", 0),
        (numeric, "so it is 1,200", "first 7, then 1200.0 apples", 1),
        (numeric, "-3", "3", 0),
        (numeric, "5", "it is .5", 0),
        (numeric, "-.5", "so -0.50 km", 1),
        (numeric, "5", "it is...5.", 1),
        (numeric, "5", "I do not know", 0),
        (numeric, "(2,3)", "it is 23", 0),
        (numeric, "(2, 3)", "it is (2,3)", 1),
        (numeric, "5", "pages 3-5", 1),
        (numeric, "1234567.5", "1,234,567.50", 1),
    ],
)
def test_verifiers(verifier, right, answer, reward):
    assert verifier({"prompt": "?", "answer": right}, answer) == reward


def test_a_verifier_of_ones_own_reads_every_field(tmp_path, monkeypatch, tokenizer, prompts):
    (tmp_path / "judges_of_mine.py").write_text(
        "def closeness(record, answer):\n    return -abs(int(answer) - record['most'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = PromptFile(prompts, tokenizer, "judges_of_mine:closeness")
    question = {"prompt": "2+1=", "answer": "3", "most": 3}
    ids = byte_level_tokenizer().encode("5").ids
    assert task.grade(question, [*ids, task.end]) == -2
    sys.modules.pop("judges_of_mine")


def test_a_prompt_begins_with_the_templates_bos(tmp_path, prompts):
    begun = byte_level_tokenizer()
    end = begun.token_to_id("<|endoftext|>")
    begun.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    begun.save(str(tmp_path / "begun.json"))
    task = PromptFile(prompts, str(tmp_path / "begun.json"))
    example = task.encode({"prompt": "2+1=", "answer": "3"})
    ids = byte_level_tokenizer().encode("2+1=3").ids
    assert example.tokens.tolist() == [end, *ids, end]


ROWS = [
    ({"path": "nowhere.jsonl"}, "dataloader.path='nowhere.jsonl' is not a file"),
    ({"verifier": "exakt"}, "dataloader.verifier=exakt is unknown; give exact, numeric or PACKAGE"),
    ({"verifier": "nowhere.judge:f"}, "dataloader.verifier=nowhere.judge:f: no module 'nowhere'"),
    ({"verifier": ":f"}, "dataloader.verifier=:f: give exact, numeric or PACKAGE.MODULE:FUNCTION"),
    ({"verifier": "math:nan"}, "dataloader.verifier=math:nan: math has no function 'nan'"),
    ({"verifier": "math:floor"}, "the verifier of task prompt_file fails on a right answer"),
    ({"line": {"prompt": "", "answer": "1"}}, "line 9: the prompt is empty"),
    ({"line": {"prompt": "1+1="}}, "line 9 cannot be read (answer=None instead of str)"),
    ({"line": {"prompt": "1" * 40, "answer": "2"}}, "training.seq_len 16 is too short"),
]


@pytest.mark.parametrize(("asked", "words"), ROWS)
def test_mistakes_are_refused_before_training(tmp_path, tokenizer, prompts, asked, words, alone):
    if "line" in asked:
        with open(prompts, "a") as file:
            file.write(json.dumps(asked.pop("line")) + "\n")
    task = PromptFile(**({"path": prompts, "tokenizer": tokenizer} | asked), most_tokens=3)
    with pytest.raises(UserError) as refused:
        train_run(reward_config(tmp_path / "run", task=task))
    assert words in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_run_counts_the_answers_that_its_verifier_fails_on(
    tmp_path, monkeypatch, tokenizer, prompts, alone
):
    (tmp_path / "strict_judge.py").write_text(
        "def judge(record, answer):\n    return (len(answer) < 2) / (len(answer) < 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = PromptFile(prompts, tokenizer, "strict_judge:judge", most_tokens=3)
    train_run(reward_config(tmp_path / "run", steps=2, task=task))
    *_, last = records(tmp_path / "run")
    assert last["rl/failed_verdicts"] > 0
    assert 0 < last["rl/answer_tokens"] <= 3
    # Its text can be read, and its parent's conversations with it.
    assert SavedRun(tmp_path / "run").tokenizer() == (Path(tokenizer), True)
    config = SavedRun(tmp_path / "run").config
    for name, more in (
        ("parent", {"text": {"turn_end": "<|im_end|>"}}),
        ("child", {"checkpoint": {"carry": {"parent": str(tmp_path / "parent")}}}),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        RunDirectory(tmp_path / name).config_json.write_text(json.dumps({**config, **more}))
    child = SavedRun(tmp_path / "child")
    assert child.text_format(byte_level_tokenizer()).turn_end == "<|im_end|>"
    shutil.rmtree(tmp_path / "parent")
    assert child.text_format(byte_level_tokenizer()) == TextFormat()


def test_a_batch_without_a_verdict_changes_nothing_and_is_finite(
    tmp_path, monkeypatch, tokenizer, prompts, alone
):
    (tmp_path / "failing_judge.py").write_text(
        "def judge(record, answer):\n    return {record['answer']: 1.0}[answer]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = PromptFile(prompts, tokenizer, "failing_judge:judge", most_tokens=3)
    train_run(reward_config(tmp_path / "run", steps=1, task=task, normaliser="batch"))
    (line,) = records(tmp_path / "run")
    assert (line["loss"], line["grad_norm"]) == (0, 0)
    assert line["rl/failed_verdicts"] > 0
