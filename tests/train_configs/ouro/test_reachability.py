"""Reachability: answers worked out again from the tokens, and the transformer of Theorem 2."""

import math
from itertools import islice

import numpy as np
import pytest

from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError
from train_configs.ouro.reachability import Query, Reachability, loops_for

TASK = Reachability(nodes=14, hidden_edges=14, shown_edges=4, distance=6)
BETA = 1e3  # exp(-BETA) is 0 in float64, so attention is uniform over what it attends to


def distances(task: Reachability, tokens: list[int]) -> np.ndarray:
    """Distances between all nodes by repeated relaxation, float64, infinite without a path."""
    found = np.full((task.nodes, task.nodes), np.inf)
    np.fill_diagonal(found, 0)
    shown = list(zip(tokens[: 2 * task.shown_edges : 2], tokens[1::2], strict=False))
    for start, end in (*task.hidden, *shown):
        found[start, end] = 1
    for middle in range(task.nodes):
        found = np.minimum(found, found[:, middle, None] + found[None, middle])
    return found


def test_labels_and_strata_are_what_the_edges_say():
    asked = [(d, q) for d in TASK.strata.values() for q in TASK.held_out_questions(6, d)]
    trained = [(None, q) for q in islice(TASK.questions(key=1), 50)]
    for stratum, question in (*asked, *trained):
        example = TASK.encode(question)
        tokens = example.tokens.tolist()
        assert len(tokens) == TASK.longest_example
        source, target = tokens[-3:-1]
        (at,) = np.flatnonzero(example.answer_labels() != IGNORED)
        distance = distances(TASK, tokens)[source, target]
        assert example.labels[at] == tokens[-1] == TASK.vocab_size - 1 - (distance == np.inf)
        assert source != target
        assert distance == (question.distance or np.inf)
        assert stratum in (None, question.distance)
        assert not TASK.hidden & {*question.shown}
        assert len({*question.shown}) == TASK.shown_edges


def theorem_2(hidden_nn: np.ndarray, shown_nn: np.ndarray, loops: int) -> np.ndarray:
    """Run the one-layer transformer of Theorem 2, float64; entry (t, s): t is reached from s.

        H ← LN(H + V H softmax((K H)ᵀ Q H)),  H ← LN(H + W_2 relu(W_1 H)),  LN(x) = 1{x > 0}

    H is (2n, n): a column of a node holds its one-hot name and the nodes that it reaches, at first
    those of its shown edges. Two changes to the printed proof: its Q leaves the lower half where it
    is, so that KᵀQ = 0, and has to move it up; and every node must reach itself, or one without
    edges attends to all nodes alike.
    """
    n = len(hidden_nn)
    one, none = np.eye(n), np.zeros((n, n))
    key = BETA * np.block([[one, none], [none, none]])
    query = np.block([[none, one], [none, none]])
    value = np.block([[none, none], [none, one]])
    w1, w2 = np.block([[none, none], [hidden_nn, none]]), np.eye(2 * n)
    state = np.block([[one], [np.maximum(shown_nn, one)]])
    for _ in range(loops):
        scores = (key @ state).T @ (query @ state)
        weights = np.exp(scores - scores.max(axis=0))
        state = state + value @ state @ (weights / weights.sum(axis=0)) > 0
        state = (state + w2 @ np.maximum(w1 @ state, 0) > 0).astype(np.float64)
    return state[n:]


def matrix(nodes: int, edges) -> np.ndarray:
    """Column s has a 1 at every t to which an edge leads from s."""
    found = np.zeros((nodes, nodes))
    for start, end in edges:
        found[end, start] = 1
    return found


def answer(question: Query, loops: int) -> float:
    hidden, shown = (matrix(TASK.nodes, edges) for edges in (TASK.hidden, question.shown))
    return theorem_2(hidden, shown, loops)[question.target, question.source]


def test_the_transformer_of_theorem_2_answers_every_question_after_its_loops():
    for distance in TASK.strata.values():
        for question in TASK.held_out_questions(10, distance):
            loops = TASK.depth(question)
            assert loops == TASK.encode(question).steps
            assert loops == math.ceil(math.log2(distance or TASK.distance)) + 1
            assert answer(question, loops) == (distance > 0)
            assert answer(question, loops + 3) == (distance > 0)
    assert TASK.most_steps == max(TASK.depth(q) for q in islice(TASK.questions(key=3), 50))


@pytest.mark.parametrize("distance", range(1, 18))
def test_one_loop_less_does_not_find_a_hidden_path(distance: int):
    path = matrix(distance + 1, [(node, node + 1) for node in range(distance)])
    nothing = np.zeros_like(path)
    assert theorem_2(path, nothing, loops_for(distance))[distance, 0] == 1
    assert theorem_2(path, nothing, loops_for(distance) - 1)[distance, 0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distance": 24}, "distance 24 must be at least 1 and below its 24 nodes"),
        ({"hidden_edges": 0, "shown_edges": 2}, "no pair at distance 3; change the number"),
        ({"nodes": 4, "hidden_edges": 10, "shown_edges": 2, "distance": 1}, "no pair without a"),
    ],
)
def test_parameters_that_leave_no_task_are_refused(change: dict, message: str):
    with pytest.raises(UserError, match=message):
        Reachability(**change)
