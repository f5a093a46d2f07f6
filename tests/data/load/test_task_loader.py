import itertools
from typing import Any

import numpy as np
import pytest

from tests.data.tasks.toy_task import Backwards
from titan_loop.data.columns import Column
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.errors import UserError

TASK, L = Backwards(), 16
END = TASK.letters


class OneDepth(Backwards):
    columns = (Column(name="depth", reader="loss", per_token=False),)


def build(
    ranks: int = 1, rank: int = 0, local_batch: int = 1, seq_len: int = L, **options: Any
) -> TaskLoader:
    config = TaskLoader.Config(**{"task": TASK, **options})
    split = {"dp_world_size": ranks, "dp_rank": rank, "local_batch_size": local_batch}
    return config.build(**split, seq_len=seq_len)


def columns(loader: TaskLoader, count: int) -> list[np.ndarray]:
    ((inputs, labels),) = loader.read_step(count)
    return [part.numpy() for part in (inputs["input"], inputs["positions"], labels, inputs["left"])]


@pytest.mark.parametrize("all_targets", [False, True])
def test_packed_windows_are_examples_without_a_gap(all_targets):
    for tokens, positions, labels, left in zip(
        *columns(build(local_batch=8, all_targets=all_targets), 8), strict=True
    ):
        starts = [*np.flatnonzero(positions == 0), L]
        assert starts[0] == 0
        for start, end in itertools.pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start))
            word = tokens[start : start + [*tokens[start:], END].index(END)]
            whole = TASK.encode(tuple(word.tolist()))
            if end < L:
                assert tokens[start:end].tolist() == whole.tokens.tolist()
                expected = whole.labels if all_targets else whole.answer_labels()
                assert labels[start:end].tolist() == expected.tolist()
                assert left[start:end].tolist() == list(range(end - start))[::-1]


def test_a_window_of_one_example_is_padded_with_documents_of_their_own():
    for tokens, positions, labels, left in zip(
        *columns(build(local_batch=8, window="example"), 8), strict=True
    ):
        example = TASK.encode(tuple(tokens[: tokens.tolist().index(END)].tolist()))
        length = len(example.tokens)
        zeros = [0] * (L - length)
        assert tokens.tolist() == [*example.tokens, *zeros]
        assert labels.tolist() == [*example.answer_labels(), *[IGNORED] * len(zeros)]
        assert positions.tolist() == [*range(length), *zeros]
        assert left.tolist() == [*reversed(range(length)), *zeros]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"task": Backwards(longest=40)},
            r"seq_len 16 is too short for .*, longest=40\): set it to",
        ),
        # The longest example has 7 tokens: 6 inputs, and the last token as their last label.
        ({"seq_len": 5}, r"seq_len 5 is too short for .*: set it to at least 6$"),
        ({"dataset": "c4"}, "dataset_path have no effect: leave them out"),
        ({"task": OneDepth()}, "window=packed: backwards has one depth for a whole example"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)
    build(seq_len=6)
