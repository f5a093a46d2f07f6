"""Prompts and right answers of a JSON-lines file, and the verifiers that judge other answers.

    {"prompt": "What is 7 times 8? ", "answer": "56"}

The task of a reward stage (`titan_loop/rl/README.md`): an answer ends with the tokenizer's end of
text or after `most_tokens`, and a verifier maps the record and the answer's text to a reward.
"""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from titan_loop.data.tasks.task import Example, Task, require_sizes
from titan_loop.errors import UserError
from titan_loop.plugins import user_function
from titan_loop.storage.json_files import read_jsonl
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    encode_prompt,
    load_tokenizer,
    require_token,
    template_bos,
    vocab_size,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Verifier = Callable[[Mapping[str, Any], str], float]
"""Maps a record of the file and an answer to a reward."""

_NUMBER = re.compile(
    r"(?:(?<!\d)-)?"  # 3-5 ends in 5
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # 1,200 is one number, (2,3) are two
    r"|(?<![.\d])\.\d+)"  # also .5, but 5 of …5 or ...5
)


def exact(record: Mapping[str, Any], answer: str) -> float:
    """Return 1 if the answer is the right one but for white space around it, else 0."""
    return float(answer.strip() == record["answer"].strip())


def numeric(record: Mapping[str, Any], answer: str) -> float:
    """Return 1 if the last number of the answer is the last one of the right answer, else 0."""
    found, wanted = (_NUMBER.findall(text) for text in (answer, record["answer"]))
    if not wanted:
        raise ValueError(f"the right answer {record['answer']!r:.40} has no number")
    return float(bool(found) and _value(found[-1]) == _value(wanted[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


VERIFIERS: Mapping[str, Verifier] = {"exact": exact, "numeric": numeric}


@dataclass(frozen=True, slots=True)
class PromptFile(Task):
    """The prompts of a file, drawn at random with repetitions."""

    name: ClassVar[str] = "prompt_file"

    path: str = ""
    """JSON lines with `prompt` and `answer`; a verifier of yours may read further fields."""

    tokenizer: str = ""
    """Path of the model's tokenizer.json, for example in the source that its parent trained on."""

    verifier: str = "exact"
    """exact, numeric, or PACKAGE.MODULE:FUNCTION of yours, which maps record and answer to a
    reward."""

    most_tokens: int = 64
    """Tokens of an answer at most, the end of text among them."""

    def __post_init__(self) -> None:
        require_sizes(self, most_tokens=1)

    @property
    def vocab_size(self) -> int:
        return vocab_size(_tokenizer(self.tokenizer))

    @property
    def longest_example(self) -> int:
        """Tokens of the longest prompt with its right answer, or with one of `most_tokens`."""
        questions = map(self.encode, _records(self.path))
        answers = ((len(each.tokens), int(each.answer.sum())) for each in questions)
        return max(whole + max(0, self.most_tokens - answer) for whole, answer in answers)

    @property
    def strata(self) -> Mapping[str, Any]:
        return {"all": None}

    @property
    def end(self) -> int:
        return require_token(_tokenizer(self.tokenizer), END_OF_TEXT, "dataloader.tokenizer")

    @property
    def answer_limit(self) -> int:
        return self.most_tokens

    def choose(self, generator: random.Random, level: int) -> None:
        """There is one kind of question."""

    def draw(self, generator: random.Random, stratum: Any) -> Mapping[str, Any]:
        records = _records(self.path)
        return records[int(generator.random() * len(records))]

    def identity(self, question: Mapping[str, Any]) -> tuple[object, ...]:
        return (question["prompt"],)

    def encode(self, question: Mapping[str, Any]) -> Example:
        """Return the prompt, after the template's BOS, and its right answer with an end of text."""
        tokenizer = _tokenizer(self.tokenizer)
        begin = template_bos(tokenizer, self.tokenizer, "correct its post_processor")
        prompt = encode_prompt(tokenizer, question["prompt"], begin)
        answer = tokenizer.encode(question["answer"], add_special_tokens=False).ids
        return Example.of_sequence(prompt, [*answer, self.end])

    def grade(self, question: Mapping[str, Any], answer: list[int]) -> float:
        kept = [token for token in answer if token != self.end]
        text = _tokenizer(self.tokenizer).decode(kept, skip_special_tokens=False)
        reward = float(_verifier(self.verifier)(question, text))
        if not math.isfinite(reward):
            raise ValueError(f"{self.verifier} returns {reward}")
        return reward


@cache  # a file is read once in a process; `RolloutLoader` records its hash
def _records(path: str) -> list[dict[str, Any]]:
    if not Path(path).is_file():
        raise UserError(f"dataloader.path={path!r} is not a file of JSON lines")
    records = read_jsonl(Path(path), {"prompt": str, "answer": str})
    empty = [number for number, each in enumerate(records, start=1) if not each["prompt"]]
    if empty:
        raise UserError(f"{path} line {empty[0]}: the prompt is empty; remove that line")
    if not records:
        raise UserError(f'{path} has no record; write lines such as {{"prompt": …, "answer": …}}')
    return records


@cache
def _tokenizer(path: str) -> "Tokenizer":
    return load_tokenizer(path)


@cache
def _verifier(name: str) -> Verifier:
    if name in VERIFIERS:
        return VERIFIERS[name]
    fix = f"give {', '.join(VERIFIERS)} or PACKAGE.MODULE:FUNCTION"
    if ":" not in name:
        raise UserError(f"dataloader.verifier={name} is unknown; {fix}")
    return user_function(name, "dataloader.verifier", fix)
