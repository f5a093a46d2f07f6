import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from titan_loop.data.demo.local_python import mano_text
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import OPERATORS, Mano, Question
from titan_loop.errors import UserError

MODULUS, LONGEST = 23, 6
TASK = Mano(MODULUS, LONGEST)


def decode(ids: list[int]) -> list[str]:
    """Name every token."""
    names = ["<bos>", "<ans>", *OPERATORS, *(str(value) for value in range(TASK.modulus))]
    names += [f"len_{length}" for length in range(TASK.max_operations + 1)]
    return [names[token_id] for token_id in ids]


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
    return islice(TASK.questions(key), count)


def test_answers_equal_an_independent_evaluator():
    for question in take(2000):
        symbols = [str(symbol) for symbol in question.expression]
        assert evaluate(symbols) == question.answer
        assert sum(symbol in "+-*" for symbol in symbols) == question.operations
        assert len(symbols) == 2 * question.operations + 1


def test_lengths_operators_and_operands_are_uniform():
    """Fixed key: 20,000 questions, counts within 5 standard deviations of uniform."""
    questions = list(take(20_000))
    lengths = Counter(question.operations for question in questions)
    assert set(lengths) == set(range(1, LONGEST + 1))
    symbols = Counter(symbol for question in questions for symbol in question.expression)
    operators, operands = [symbols[s] for s in "+-*"], [symbols[v] for v in range(MODULUS)]
    for group in (list(lengths.values()), operators, operands):
        mean = sum(group) / len(group)
        assert all(abs(count - mean) < 5 * mean**0.5 for count in group)


def test_the_exam_is_never_trained_on():
    assert not any(TASK.is_held_out(question) for question in take(5000))
    questions = TASK.held_out_questions(50, LONGEST)
    assert all(TASK.is_held_out(question) for question in questions)
    assert {question.operations for question in questions} == {LONGEST}
    assert TASK.held_out_one_in == 64


def test_exam_answers():
    (examples,) = TASK.exam(20).values()
    assert len(examples) == 20
    # An answer is a label only: the longest example has one token more than its inputs.
    assert {len(example.tokens) for example in examples} == {TASK.longest_example}
    for example in examples:
        bos, length, *symbols, mark, answer = decode(example.tokens.tolist())
        assert (bos, length, mark) == ("<bos>", f"len_{LONGEST}", "<ans>")
        assert answer == str(evaluate(symbols))
        (graded,) = example.answer.nonzero()[0]
        assert decode([int(example.tokens[graded])]) == ["<ans>"]
        assert example.labels[graded] == example.tokens[graded + 1]


def test_the_exam_of_earlier_versions():
    """Windows as in 0.1, and its exam without the questions that were asked twice.

    Another exam or other windows would not compare with old runs.
    """
    (examples,) = Mano(5, 3).exam(512).values()
    digest = hashlib.sha256(b"".join(example.tokens.tobytes() for example in examples))
    assert digest.hexdigest() == "95eab597afe9cbae73e83b9fd0a6432254ae57edd53ee1971aa4e53e54d6b476"
    config = TaskLoader.Config(task=Mano(5, 3))
    loader = config.build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=4)
    ((inputs, labels),) = loader.read_step(4)
    digest = hashlib.sha256()
    for column in (inputs["input"], inputs["positions"], labels):
        digest.update(column.numpy().tobytes())
    assert digest.hexdigest() == "caf64a7b5b3d920ca6b88fb4df8237ab85fb8e2f819bbd2b0ce7cd124b2e21f4"
    assert loader.data_hash == "8fe08b57377ce0c1d95f572d270766b1"


def test_text_form():
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


def test_mistakes():
    with pytest.raises(UserError, match="modulus 1 must be at least 2"):
        Mano(1, 3)
    with pytest.raises(UserError, match="max_operations 0 must be at least 1"):
        Mano(5, 0)
    with pytest.raises(
        UserError, match=r"Mano\(modulus=2, max_operations=1\) has too few examples"
    ):  # rather than searched for without end
        Mano(2, 1).held_out_questions(3, 1)
