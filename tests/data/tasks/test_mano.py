from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import (
    HELD_OUT_ONE_IN,
    Mano,
    Question,
    held_out_questions,
    is_held_out,
    mano_text,
    training_questions,
)
from titan_loop.data.tasks.task import recorded_task
from titan_loop.errors import UserError

MODULUS, LONGEST, L = 23, 6, 64


def evaluate(symbols: list[str]) -> int:
    """Independent of the generator: a stack machine that reads the expression backwards."""
    stack: list[int] = []
    for symbol in reversed(symbols):
        if symbol in "+-*":
            left, right = stack.pop(), stack.pop()
            stack.append({"+": left + right, "-": left - right, "*": left * right}[symbol])
        else:
            stack.append(int(symbol))
    (result,) = stack
    return result % MODULUS


def take(count: int, key: int = 0) -> Iterator[Question]:
    return islice(training_questions(key, LONGEST, MODULUS), count)


def test_answers_equal_an_independent_evaluator() -> None:
    for question in take(2000):
        symbols = [str(symbol) for symbol in question.expression]
        assert evaluate(symbols) == question.answer
        assert sum(symbol in "+-*" for symbol in symbols) == question.operations
        assert len(symbols) == 2 * question.operations + 1


def test_lengths_operators_and_operands_are_uniform() -> None:
    """Fixed key: 20,000 questions, counts within 5 standard deviations of uniform."""
    questions = list(take(20_000))
    lengths = Counter(question.operations for question in questions)
    assert set(lengths) == set(range(1, LONGEST + 1))
    symbols = Counter(symbol for question in questions for symbol in question.expression)
    operators, operands = [symbols[s] for s in "+-*"], [symbols[v] for v in range(MODULUS)]
    for group in (list(lengths.values()), operators, operands):
        mean = sum(group) / len(group)
        assert all(abs(count - mean) < 5 * mean**0.5 for count in group)


def test_the_exam_is_never_trained_on() -> None:
    assert not any(is_held_out(question) for question in take(5000))
    questions = held_out_questions(50, operations=LONGEST, modulus=MODULUS)
    assert all(is_held_out(question) for question in questions)
    assert {question.operations for question in questions} == {LONGEST}
    assert HELD_OUT_ONE_IN == 64


def test_exam_shapes_and_answers() -> None:
    task = Mano(MODULUS, LONGEST)
    prompts, answers = task.exam(20)
    assert prompts.shape == (20, 2 * LONGEST + 4)
    assert answers.shape == (20,)
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        bos, length, *symbols, mark = task.decode(prompt).split()
        assert (bos, length, mark) == ("<bos>", f"len_{LONGEST}", "<ans>")
        assert task.decode([answer]) == str(evaluate(symbols))


def test_text_form() -> None:
    text = mano_text(1, 30)
    assert text == mano_text(1, 30)
    assert text != mano_text(2, 30)
    _, *lines = text.splitlines()
    assert len(lines) == 30
    for line in lines:
        length, *symbols, equals, answer = line.split()
        assert equals == "="
        assert length == f"len_{len(symbols) // 2}"
        assert evaluate(symbols) == int(answer)


def build(ranks: int = 1, rank: int = 0, local_batch: int = 1, **options) -> TaskLoader:
    config = TaskLoader.Config(modulus=MODULUS, max_operations=LONGEST, **options)
    return config.build(dp_world_size=ranks, dp_rank=rank, seq_len=L, local_batch_size=local_batch)


def test_windows_hold_whole_examples_and_label_answers_only() -> None:
    task = Mano(MODULUS, LONGEST)
    ((inputs, labels),) = build(local_batch=8).read_step(8)
    for ids, positions, targets in zip(inputs["input"], inputs["positions"], labels, strict=True):
        names = task.decode(ids.tolist()).split()
        starts = [index for index, name in enumerate(names) if name == "<bos>"]
        assert torch.equal(torch.nonzero(positions == 0).flatten(), torch.tensor(starts))
        for index, name in enumerate(names):
            assert (targets[index] != IGNORE_INDEX) == (name == "<ans>")
            if name == "<ans>":
                start = max(start for start in starts if start < index)
                value = evaluate(names[start + 2 : index])
                assert task.decode([int(targets[index])]) == str(value)


def test_all_targets_ignores_only_the_next_example() -> None:
    ((inputs, labels),) = build(local_batch=4, all_targets=True).read_step(4)
    next_starts = inputs["positions"][:, 1:] == 0
    assert torch.equal(labels[:, :-1] == IGNORE_INDEX, next_starts)


def test_windows_do_not_depend_on_the_split() -> None:
    whole, parts = build(), [build(2, rank, 2) for rank in range(2)]
    windows = [inputs["input"][0] for inputs, _ in whole.read_step(16)]
    for part in parts:
        part.load_state_dict(build().state_dict())
    batches = [part.read_step(16) for part in parts]
    merged = [row for m in range(4) for rank in range(2) for row in batches[rank][m][0]["input"]]
    assert all(torch.equal(a, b) for a, b in zip(windows, merged, strict=True))
    assert {whole.data_hash} == {part.data_hash for part in parts}


def test_seed_changes_examples() -> None:
    ((one, _),), ((other, _),) = build(seed=0).read_step(1), build(seed=1).read_step(1)
    assert not torch.equal(one["input"], other["input"])


@pytest.mark.parametrize("other", [{"seed": 1}, {"all_targets": True}])
def test_resuming_another_task_is_refused(other: dict) -> None:
    with pytest.raises(UserError, match="other data"):
        build(**other).load_state_dict(build().state_dict())


def test_vocabulary_from_the_config() -> None:
    config = TaskLoader.Config(modulus=23, max_operations=10)
    assert config.vocabulary() == (2 + 3 + 23 + 11, 38)
    assert config.source_paths() == []
    assert config.task() == Mano(23, 10)


def test_a_checkpoint_names_its_task() -> None:
    assert recorded_task(build().state_dict()) == Mano(MODULUS, LONGEST)
    assert recorded_task({"data": {"seed": 0, "sources": []}}) is None
    assert recorded_task({}) is None  # an imported model
    with pytest.raises(UserError, match="the task 'chess', which this version does not know"):
        recorded_task({"data": {"task": "chess"}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modulus": 1}, "modulus 1 must be at least 2"),
        ({"max_operations": 0}, "max_operations 0 must be at least 1"),
        (
            {"max_operations": 40},
            "seq_len 64 is too short for 40 operations: set it to at least 84",
        ),
        ({"dataset": "c4"}, "have no effect on Mano"),
    ],
)
def test_mistakes(options: dict, message: str) -> None:
    config = TaskLoader.Config(**options)
    with pytest.raises(UserError, match=message):
        config.build(dp_world_size=1, dp_rank=0, seq_len=L, local_batch_size=1)


def test_a_task_too_small_for_an_exam_is_refused_instead_of_searching_for_ever():
    with pytest.raises(UserError, match="too few expressions"):
        held_out_questions(3, operations=1, modulus=2)
