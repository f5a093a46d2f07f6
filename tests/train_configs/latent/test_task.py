"""Graphs of equations: every value is worked out again from the text, by another evaluator."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.task import Example
from titan_loop.evaluation.exam import Exam
from train_configs.latent.task import SYNTAX, DagArithmetic, DagChainOfThought, Node

SMALL = {"modulus": 7, "nodes": 12, "leaves": 3, "names": 40, "test_nodes": (4, 20)}
TASK = DagArithmetic(**SMALL, operations="+-*", most_depth=4)
EMPTY = 7
GRAPH = (Node(5, (), (), 3, 1), Node(0, (), (), 6, 1), Node(9, (1, 0), ("-",), 3, 2))


def text(task: DagArithmetic, example: Example) -> str:
    """Write factored tokens as an expression in Python's notation, one equation a line."""
    words = []
    for value, (syntax, variable, operation) in zip(
        example.tokens, example.columns["factors"], strict=True
    ):
        parts = {"value": str(value), "variable": f"x{variable}", ",": "\n", "=": "="}
        parts["operation"] = task.operations[operation % len(task.operations)]
        words.append(parts[SYNTAX[syntax]])
    return "".join(words)


def solved(equations: str, modulus: int) -> dict[str, tuple[int, int]]:
    """Return name → (value, depth), by brackets around every product of the left to right."""
    known: dict[str, tuple[int, int]] = {}
    for equation in equations.splitlines():
        left, name = equation.split("=")
        terms = left.replace("+", " + ").replace("-", " - ").replace("*", " * ").split()
        operands = terms[::2]
        depth = 1 + max(known[term][1] if term in known else 0 for term in operands)
        values = [str(known[term][0]) if term in known else term for term in operands]
        code = values[0]
        for operation, value in zip(terms[1::2], values[1:], strict=True):
            code = f"({code}){operation}{value}"
        known[name] = (eval(code) % modulus, depth)
    return known


@pytest.mark.parametrize("stratum", [None, "20_nodes"])
def test_values_and_depths_are_those_of_the_text(stratum):
    if stratum is None:
        questions = list(islice(TASK.questions(key=1), 100))
    else:
        questions = TASK.held_out_questions(5, TASK.strata[stratum])
    for question in questions:
        example = TASK.encode(question)
        expected = solved(text(TASK, example), TASK.modulus)
        depth = example.columns["depth"]
        named = example.columns["factors"][:, 1]
        found = {f"x{named[at]}": (example.labels[at], depth[at]) for at in depth.nonzero()[0]}
        assert found == expected
        assert TASK.depth(question) == max(depth for _, depth in expected.values())
        np.testing.assert_array_equal(example.answer, depth > 0)
        # Where nothing is to be worked out, the value factor stays what it is.
        np.testing.assert_array_equal(example.labels[depth == 0], example.tokens[depth == 0])
        assert set(example.tokens[depth > 0]) == {EMPTY}
        assert len(example.tokens) <= TASK.positions(len(question))


def test_training_graphs_are_as_configured():
    questions = list(islice(TASK.questions(key=2), 400))
    names, parents, depths = Counter(), Counter(), Counter()
    for question in questions:
        assert len({node.name for node in question}) == len(question) == TASK.nodes
        assert all(not node.parents for node in question[: TASK.leaves])
        assert all(node.parents for node in question[TASK.leaves :])
        names.update(node.name for node in question)
        depths.update(node.depth for node in question)
        parents.update(len(node.parents) for node in question[TASK.leaves :])
        for index, node in enumerate(question):
            assert all(parent < index for parent in node.parents)
            assert len({*node.parents}) == len(node.parents)
    assert set(names) == set(range(TASK.names))
    assert max(depths) == TASK.most_depth
    # 3,600 nodes have 1, 2 or 3 parents equally often; five standard deviations.
    assert all(abs(parents[count] - 1200) < 5 * (3600 * 2 / 9) ** 0.5 for count in (1, 2, 3))
    mixed = DagArithmetic(**SMALL, fewest_nodes=5)
    sizes = Counter(len(question) for question in islice(mixed.questions(key=2), 800))
    assert {*sizes} == {*range(5, 13)}
    assert all(abs(count - 100) < 5 * 10 for count in sizes.values())
    zeros = DagArithmetic(**SMALL, leaf_zeros=0.4)
    leaves = [node.value for q in islice(zeros.questions(key=2), 400) for node in q[:3]]
    share = 0.4 + 0.6 / 7  # of 1,200 leaves
    assert abs(leaves.count(0) - 1200 * share) < 5 * (1200 * share * (1 - share)) ** 0.5
    deep = TASK.draw(random.Random(0), TASK.strata["20_nodes"])
    assert max(node.depth for node in deep) > TASK.most_depth


def test_an_example_and_what_makes_it_the_same():
    example = TASK.encode(GRAPH)
    assert text(TASK, example) == "3=x5\n6=x0\nx0-x5=x9\n"
    assert example.answer_labels().tolist() == [
        *(IGNORED, IGNORED, 3, IGNORED),
        *(IGNORED, IGNORED, 6, IGNORED),
        *(IGNORED,) * 4,
        3,
        IGNORED,
    ]
    other = (*GRAPH[:2], GRAPH[2]._replace(operations=("+",), value=2))
    assert TASK.identity(GRAPH) != TASK.identity(other)
    assert TASK.vocab_size == 9
    assert TASK.factor_sizes == (5, 41, 4)


@pytest.mark.parametrize(
    ("thought", "asked"),
    [
        ("values", "x5 = 3 , x0 = 6 , x9 = 3 ,"),
        ("bare_equations", "x5 = 3 , x0 = 6 , x9 = x0 - x5 = 3 ,"),
        ("equations", "x5 = 3 , x0 = 6 , x9 = x0 - x5 = 6 - 3 = 3 ,"),
    ],
)
def test_a_chain_of_thought_solves_the_graph_in_order(thought, asked):
    task = DagChainOfThought(**SMALL, operations="+-*", thought=thought)
    words = [*map(str, range(7)), *(f"x{name}" for name in range(40)), *"+-*", "=", ",", "<cot>"]
    assert len(words) == task.vocab_size
    example = task.encode(GRAPH)
    told = " ".join(words[token] for token in example.tokens)
    assert told == f"3 = x5 , 6 = x0 , x0 - x5 = x9 <cot> {asked}"
    assert " ".join(words[label] for label in example.labels[example.answer]) == asked
    longest = max(len(task.encode(q).tokens) for q in islice(task.questions(key=3), 200))
    assert longest <= task.longest_example


def test_every_question_is_also_read_at_its_own_depth():
    task = DagArithmetic(modulus=3, nodes=5, leaves=2, names=6, test_nodes=(5,))
    exam = Exam(task, 20, vocab_size=task.vocab_size, room=64)
    (needed,) = exam.steps.values()
    assert needed == [task.depth(q) for q in task.held_out_questions(20, task.strata["5_nodes"])]
    assert len({*needed}) > 1
    right = np.random.default_rng(0).integers(4, 6, (4, 20)).astype(float)  # 5 are all

    def sums(depths):
        steps = np.array([[5.0 * depth] * 20 for depth in depths])
        return lambda windows: (right[: len(depths)], steps)

    names = [f"static:{depth}" for depth in (1, 2, 3, 4)]
    own = exam.grade(names, sums([1, 2, 3, 4]))["dag_arithmetic"]["depth"]
    wanted = [right[steps - 1, window] == 5 for window, steps in enumerate(needed)]
    assert own.metrics["acc,none"] == np.mean(wanted)
    assert own.mean_steps == np.mean(needed)
    shallow = exam.grade(names[:1], sums([1]))["dag_arithmetic"]
    assert list(shallow) == ["static:1"]
