import hashlib
from itertools import islice

import pytest

from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError

MODULUS, LONGEST = 23, 6
TASK = Mano(MODULUS, LONGEST)


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


def test_answers_equal_an_independent_evaluator():
    for question in islice(TASK.questions(0), 2000):
        symbols = [str(symbol) for symbol in question.expression]
        assert evaluate(symbols) == question.answer
        assert sum(symbol in "+-*" for symbol in symbols) == question.operations
        assert len(symbols) == 2 * question.operations + 1


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


def test_mistakes():
    with pytest.raises(UserError, match="modulus 1 must be at least 2"):
        Mano(1, 3)
    with pytest.raises(UserError, match="max_operations 0 must be at least 1"):
        Mano(5, 0)
    with pytest.raises(
        UserError, match=r"Mano\(modulus=2, max_operations=1\) has too few examples"
    ):  # rather than searched for without end
        Mano(2, 1).held_out_questions(3, 1)
