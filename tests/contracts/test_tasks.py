"""For every generated task: it is recorded, fits its window, and never trains on its exam."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest

from tests.contracts.families import as_json
from tests.inference.conftest import byte_level_tokenizer
from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.recorded_task import recorded_task
from titan_loop.plugins import find, names


def prompts(folder: Path) -> dict[str, str]:
    path, tokenizer = folder / "prompts.jsonl", folder / "tokenizer.json"
    byte_level_tokenizer().save(str(tokenizer))
    lines = [{"prompt": f"{n} plus 1 is ", "answer": str(n + 1)} for n in range(500)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"path": str(path), "tokenizer": str(tokenizer)}


MADE = {"prompt_file": prompts}
"""Parameters of tasks without a default."""


@pytest.mark.parametrize("name", names("tasks"))
def test_a_task(name, tmp_path):
    task = find("tasks", name)(**MADE[name](tmp_path) if name in MADE else {})
    assert recorded_task({"data": as_json({"task": name, **asdict(task)})}) == task
    trained = [*islice(task.questions(key=1), 200)]
    asked = [q for at in task.strata.values() for q in task.held_out_questions(5, at)]
    for question in (*trained, *asked):
        example = task.encode(question)
        assert len(example.tokens) == len(example.labels)
        assert 0 <= example.tokens.min() <= example.tokens.max() < task.vocab_size
        answers = example.answer_labels()
        assert (answers != IGNORED).any()
        assert answers.max() < task.vocab_size
    assert max(len(task.encode(question).tokens) for question in trained) <= task.longest_example
    assert not any(task.is_held_out(question) for question in trained)
