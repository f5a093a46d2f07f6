"""Depo and MQAR: answers are worked out again from the tokens alone."""

from itertools import islice, pairwise

import numpy as np
import pytest

from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.depo import Depo
from titan_loop.data.tasks.mqar import MQAR
from titan_loop.errors import UserError

DEPO = Depo(names=9, nodes=5, hops=4, queries=3)
RECALL = MQAR(keys=7, values=5, pairs=6, queries=3)


def depo_answers(tokens: list[int]) -> dict[int, int]:
    """Position of a question's last token → the node reached, from the edges in the tokens."""
    edges = dict(zip(tokens[: 2 * DEPO.nodes : 2], tokens[1 : 2 * DEPO.nodes : 2], strict=True))
    answers = {}
    for at in range(2 * DEPO.nodes, len(tokens), 3):
        node = tokens[at + 1]
        for _ in range(tokens[at] - DEPO.names + 1):
            node = edges[node]
        answers[at + 1] = node
    return answers


def recall_answers(tokens: list[int]) -> dict[int, int]:
    """Position of a query → the value that follows its key for the first time."""
    answers, known = {}, {}
    for at, (key, value) in enumerate(pairwise(tokens)):
        if at % 2 == 0:
            if key in known:
                answers[at] = known[key]
            known.setdefault(key, value)
    return answers


@pytest.mark.parametrize(("task", "solve"), [(DEPO, depo_answers), (RECALL, recall_answers)])
def test_labels_are_what_the_prompt_says(task, solve):
    asked = [q for at in task.strata.values() for q in task.held_out_questions(20, at)]
    for question in [*islice(task.questions(key=1), 200), *asked]:
        example = task.encode(question)
        assert max(example.tokens) < task.vocab_size
        assert len(example.tokens) <= task.longest_example
        labels = example.answer_labels()
        graded = {int(at): int(labels[at]) for at in np.flatnonzero(labels != IGNORED)}
        assert graded == solve(example.tokens.tolist())


def test_depo_asks_every_distance_in_training_and_one_in_a_stratum():
    trained = list(islice(DEPO.questions(key=2), 200))
    assert {len(q.questions) for q in trained} == {3}
    assert {steps for q in trained for steps, _ in q.questions} == {1, 2, 3, 4}
    exam = {name: DEPO.held_out_questions(30, at) for name, at in DEPO.strata.items()}
    for name, questions in exam.items():
        distances = {steps for q in questions for steps, _ in q.questions}
        assert distances == {int(name[0])}
        assert {len(q.questions) for q in questions} == {1}


def test_a_cycle_is_held_out_in_every_order_of_its_edges():
    (question,) = DEPO.held_out_questions(1, (1, 1))
    turned = question._replace(
        nodes=question.nodes[2:] + question.nodes[:2], order=question.order[::-1]
    )
    assert DEPO.identity(turned) == DEPO.identity(question)
    assert DEPO.is_held_out(turned)


def test_mqar_trains_on_powers_of_two():
    assert list(RECALL.strata) == ["2_pairs", "4_pairs"]
    drawn = [len(q.keys) for q in islice(RECALL.questions(key=3), 400)]
    assert set(drawn) == {2, 4}
    assert drawn.count(2) / 400 == pytest.approx(0.5, abs=0.125)  # five standard deviations


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Depo(nodes=65), "nodes 65 must be at least 3 and at most its 64 names"),
        (lambda: Depo(hops=16), "hops 16 must be at least 1 and below its 16 nodes"),
        (lambda: Depo(queries=0), "queries 0 must be at least 1"),
        (lambda: MQAR(pairs=65), "pairs 65 must be at least 2 and at most its 64 keys"),
        (lambda: MQAR(values=1), "values 1 must be at least 2"),
    ],
)
def test_parameters_that_leave_no_task_are_refused(make, message: str):
    with pytest.raises(UserError, match=message):
        make()
