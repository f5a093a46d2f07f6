"""Capo: biographies say what the world holds, and the exam's bits are those of the formula."""

import math
from itertools import islice

import numpy as np
import pytest
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import Exam
from train_configs.physics.capo import _FIXED, _POOLS, Biography, Capo

EXACT = 1e-9  # float64; a person's nats are tens
SMALL = Capo(
    people=30, first_names=5, middle_names=4, last_names=6, years=7, cities=3, universities=8,
    majors=2, employers=9,
)  # fmt: skip
POOLS = "first_names middle_names last_names genders months days years cities universities majors"
NAMED = [*POOLS.split(), "employers"]


def decode(task: Capo, ids: list[int]) -> list[str]:
    """Name every token: words as they are, values by pool and number."""
    names = [*_FIXED]
    for pool, size in zip(_POOLS, task._sizes, strict=True):
        names += [f"{pool}_{number}" for number in range(size)]
    return [names[token_id] for token_id in ids]


def said(biography: Biography) -> list[str]:
    return decode(SMALL, SMALL.encode(biography).tokens.tolist())


def test_a_biography_says_name_and_attributes_of_its_person():
    seen = set()
    for biography in islice(SMALL.questions(key=0), 300):
        words = said(biography)
        told = dict(word.rsplit("_", 1) for word in words if "_" in word)
        assert [int(told[name]) for name in NAMED] == SMALL.world[biography.person].tolist()
        assert words[0] == "<bos>"
        assert words.count(".") == 5
        assert len(words) <= SMALL.longest_example
        seen.add(biography.person)
    assert len(seen) == SMALL.people  # one is missed once in 900 tests
    assert said(Biography(3, (1, 0, 3, 2, 0), "both"))[4:8] == ["came", "into", "this", "world"]
    lengths = {len(said(Biography(0, (wording,) * 5, "both"))) for wording in range(4)}
    assert len(lengths) > 1


def test_the_answer_is_the_name_the_values_or_both():
    def graded(graded) -> list[str]:
        example = SMALL.encode(Biography(7, (0, 1, 2, 3, 0), graded))
        labels = example.answer_labels()
        return decode(SMALL, [int(x) for x in labels if x != IGNORED])

    words = [word for word in said(Biography(7, (0, 1, 2, 3, 0), "both")) if "_" in word]
    del words[8], words[9], words[10]  # the second, third and fourth pronoun
    assert graded("both") == words
    assert graded("names") == words[:3]
    assert graded("values") == words[3:]


def nats_of(model: str, windows: HeldOutWindows, task: Capo, shift: int) -> np.ndarray:
    """What a model that knows nothing, or everybody, says of each window's labels."""
    first = task.vocab_size - sum(task._sizes)
    pool = np.repeat(np.arange(len(task._sizes)), task._sizes)
    nats = np.zeros(len(windows.labels))
    for number, row in enumerate(windows.labels.tolist()):
        labels = [label - shift - first for label in row if label != IGNORE_INDEX]
        told: list[int] = []
        for label in labels:
            if model == "uniform":
                nats[number] += math.log(task._sizes[pool[label]])
            elif pool[label] < 3:  # of those who share the name so far, this many go on so
                told.append(label - sum(task._sizes[: pool[label]]))
                agree = [
                    sum((task.world[:, :n] == told[:n]).all(axis=1))
                    for n in (len(told) - 1, len(told))
                ]
                nats[number] += math.log(agree[0] / agree[1])
    return nats


def test_an_oracle_and_a_uniform_model_know_the_bits_of_the_formula():
    check_bits(SMALL, 0)


def check_bits(task: Task, shift: int) -> None:
    """Grade planted models of the small world, whose token ids begin at `shift`."""
    exam = Exam(task, 1000, vocab_size=task.vocab_size, room=64)
    assert len(exam.windows[f"{task.name}/names"].labels) == SMALL.people

    def zeros(windows):
        return (np.zeros((2, len(windows.labels))),) * 2

    def nats(windows):
        each = [nats_of(model, windows, SMALL, shift) for model in ("uniform", "oracle")]
        return np.stack(each), np.ones((2, len(windows.labels)))

    graded = exam.grade(["uniform", "oracle"], zeros, nats, (500, 200))
    found = graded[f"{task.name}/knowledge"]
    values = math.log2(2 * 12 * 28 * 7 * 3 * 8 * 2 * 9)
    uniform, oracle = (found[reading].metrics for reading in ("uniform", "oracle"))
    assert all(value == pytest.approx(0, abs=EXACT) for value in uniform.values())
    bits = math.log2(5 * 4 * 6 / 30) + values
    assert oracle["names_bits"] == pytest.approx(math.log2(120 / 30), abs=EXACT)
    assert oracle["values_bits"] == pytest.approx(values, abs=EXACT)
    assert oracle["bits"] == pytest.approx(bits, abs=EXACT)
    assert oracle["bits_per_parameter"] == pytest.approx(30 * bits / 500, abs=EXACT)
    assert oracle["bits_per_inner_parameter"] == pytest.approx(30 * bits / 200, abs=EXACT)
