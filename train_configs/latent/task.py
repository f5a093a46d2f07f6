"""Modular arithmetic on random graphs of equations, and its chain of thought.

    20 = x3 , 7 = x0 , x3 + x0 = x5 , x5 × x3 + x0 = x1

A leaf is a number; every other node combines earlier nodes, from left to right, mod m. The model is
asked for the value of every node. A leaf has depth 1, any other node one more than its deepest
parent, so a model that works out one layer of the graph per step needs as many steps as the deepest
node's depth. (The authors' code counts a leaf as depth 0: its depth of 6 is 7 here.)

`DagArithmetic` writes a token as four factors: syntax, variable, operation and value. The value is
the token id. The value of a node appears at its name after the equals sign, and is EMPTY there
until it is worked out; at names before an equals sign the value is always EMPTY.
`DagChainOfThought` writes the same graphs as plain text, followed by the solution, node by node.

Source: "Unlocking Out-of-Distribution Generalization in Transformers via Recursive Latent Space
Reasoning" (arXiv 2510.14095), section 3.1, Appendices A.2 and B.1. Choices that the paper leaves
open follow the authors' code: training graphs of `nodes` nodes, of which `leaves` are numbers; 1 to
`most_parents` distinct parents, uniform among earlier nodes below the largest depth; operations and
names uniform. Tests are of any depth. Deviation: graphs are drawn without end, and 1 in 8, chosen
by hash, is never trained on.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from titan_loop.data.columns import Column
from titan_loop.data.tasks.task import Example, Task
from titan_loop.errors import UserError

OPERATIONS = "+-*"
SYNTAX = ("value", "variable", "operation", "=", ",")
_VALUE, _VARIABLE, _OPERATION, _EQUALS, _SEPARATOR = range(len(SYNTAX))


class Node(NamedTuple):
    """A node of a graph.

    Attributes:
        name: Number of its variable.
        parents: Indices of earlier nodes, from left to right; none for a leaf.
        operations: Operations between the parents, one fewer than parents; none for a leaf.
        value: Value of its expression.
        depth: 1 for a leaf, else one more than the depth of its deepest parent.
    """

    name: int
    parents: tuple[int, ...]
    operations: tuple[str, ...]
    value: int
    depth: int


class Size(NamedTuple):
    """Size of a random graph: its number of nodes, and the largest depth allowed, None for any."""

    nodes: int
    most_depth: int | None


Graph = tuple[Node, ...]
Thought = Literal["values", "bare_equations", "equations"]


def combined(operations: str | tuple[str, ...], values: list[int], modulus: int) -> int:
    """Return the value of an expression, from left to right without precedence."""
    result = values[0]
    for operation, value in zip(operations, values[1:], strict=True):
        if operation == "+":
            result += value
        else:
            result = result - value if operation == "-" else result * value
    return result % modulus


@dataclass(frozen=True, slots=True)
class DagArithmetic(Task):
    """Graphs as factored tokens; the label of every position is its final value factor.

    Token ids are values of the value factor: 0 … modulus - 1, EMPTY, then N/A for all but numbers
    and variables. `syntax` (an index of `SYNTAX`), `variable` and `operation` (N/A is the last
    index of each) are the column `factors`; `depth` is the depth of the node that a name defines, 0
    at other positions; `solved` is the value factor once everything is worked out. Answers are the
    values of the names after equals signs.

    Raises:
        UserError: If a parameter is out of range.
    """

    name: ClassVar[str] = "dag_arithmetic"
    columns: ClassVar[tuple[Column, ...]] = (
        Column(name="factors", reader="both", shape=(3,)),
        Column(name="depth", reader="both"),
        Column(name="solved", reader="model"),
    )
    knows_depth: ClassVar[bool] = True
    held_out_one_in: ClassVar[int] = 8

    modulus: int = 23
    """m; values are 0 … m - 1."""

    operations: str = "+"
    """Operations that occur: some of the characters `+-*`."""

    nodes: int = 32
    """Number of nodes of a training graph; of the largest if `fewest_nodes` is set."""

    fewest_nodes: int | None = None
    """Fewest nodes of a training graph (None: `nodes`); sizes up to `nodes` are equally likely."""

    leaves: int = 6
    """Number of leaves of every graph, in training and in the exam."""

    leaf_zeros: float = 0.0
    """Probability that a leaf is 0; else its value is uniform, as in the paper. Of uniform values
    one parent says nothing about a sum, which a model can then learn only as a whole."""

    most_parents: int = 3
    """Largest number of parents of a node."""

    names: int = 128
    """Number of variable names to draw from; training draws from all, so that none is untrained."""

    most_depth: int | None = 6
    """Largest depth of a training graph's node; None for any."""

    by_depth: bool = False
    """Whether equations are sorted by depth, as in the authors' code, or stay as drawn."""

    test_nodes: tuple[int, ...] = (8, 16, 32, 40, 48, 64, 96, 128)
    """Numbers of nodes of the exam's graphs, one stratum each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "test_nodes", (*self.test_nodes,))  # a list from JSON
        for field, value, least in (
            ("modulus", self.modulus, 2),
            ("leaves", self.leaves, 1),
            ("most_parents", self.most_parents, 1),
            ("most_depth", 2 if self.most_depth is None else self.most_depth, 2),
        ):
            if value < least:
                raise UserError(f"{self.name} {field} {value} must be at least {least}")
        if not 0 <= self.leaf_zeros <= 1:
            raise UserError(f"{self.name} leaf_zeros {self.leaf_zeros} must be from 0 to 1")
        if not self.operations or not set(self.operations) <= set(OPERATIONS):
            raise UserError(
                f"{self.name} operations {self.operations!r} must be some of {OPERATIONS}"
            )
        fewest = self.nodes if self.fewest_nodes is None else self.fewest_nodes
        if fewest > self.nodes:
            raise UserError(
                f"{self.name} fewest_nodes {fewest} must be at most its nodes {self.nodes}"
            )
        for nodes in (fewest, self.nodes, *self.test_nodes):
            if nodes < self.leaves:
                raise UserError(
                    f"{self.name} graphs of {nodes} nodes are smaller than their leaves "
                    f"{self.leaves}: raise nodes and test_nodes, or lower leaves"
                )
            if nodes > self.names:
                raise UserError(
                    f"{self.name} graphs of {nodes} nodes need as many names, not names "
                    f"{self.names}: raise names"
                )

    @property
    def empty(self) -> int:
        """Token id of a value that is not worked out."""
        return self.modulus

    @property
    def vocab_size(self) -> int:
        """Number of values of the value factor."""
        return self.modulus + 2

    @property
    def factor_sizes(self) -> tuple[int, ...]:
        """Number of syntax symbols, variables and operations, N/A included."""
        return len(SYNTAX), self.names + 1, len(self.operations) + 1

    @property
    def model_options(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the factors other than the value."""
        return {"factors": self.factor_sizes}

    @property
    def longest_example(self) -> int:
        """Positions of the longest training graph."""
        return self.positions(self.nodes)

    def positions(self, nodes: int) -> int:
        """Return the positions of the longest graph of `nodes` nodes."""
        return 4 * self.leaves + (nodes - self.leaves) * (2 * self.most_parents + 2)

    @property
    def most_steps(self) -> int:
        """Largest depth of a training graph: `most_depth`, or less if nodes are too few."""
        chain = self.nodes - self.leaves + 1
        return chain if self.most_depth is None else min(self.most_depth, chain)

    @property
    def strata(self) -> Mapping[str, Size]:
        """Sizes of the exam's graphs, by name; their depth has no limit."""
        return {f"{nodes}_nodes": Size(nodes, None) for nodes in self.test_nodes}

    def choose(self, generator: random.Random, level: int) -> Size:
        """Choose the size of a training graph."""
        fewest = self.nodes if self.fewest_nodes is None else self.fewest_nodes
        nodes = fewest + int(generator.random() * (self.nodes - fewest + 1))
        return Size(nodes, self.most_depth)

    def draw(self, generator: random.Random, stratum: Size) -> Graph:
        """Draw names, then leaves, then the other nodes, each with earlier nodes as parents."""
        names = _sample(generator, range(self.names), stratum.nodes)
        graph: list[Node] = []
        shallow: list[int] = []  # nodes that may have children
        for index, name in enumerate(names):
            if index < self.leaves:
                value = int(generator.random() * self.modulus)
                if self.leaf_zeros and generator.random() < self.leaf_zeros:
                    value = 0
                node = Node(name, (), (), value, 1)
            else:
                count = 1 + int(generator.random() * min(self.most_parents, len(shallow)))
                parents = _sample(generator, shallow, count)
                operations = tuple(
                    self.operations[int(generator.random() * len(self.operations))]
                    for _ in range(count - 1)
                )
                value = combined(operations, [graph[p].value for p in parents], self.modulus)
                depth = 1 + max(graph[parent].depth for parent in parents)
                node = Node(name, tuple(parents), operations, value, depth)
            graph.append(node)
            if stratum.most_depth is None or node.depth < stratum.most_depth:
                shallow.append(index)
        return tuple(graph)

    def identity(self, question: Graph) -> tuple[object, ...]:
        """Return the nodes' fields without values and depths that follow from the others."""
        return tuple(
            (node.name, node.parents, "".join(node.operations) if node.parents else node.value)
            for node in question
        )

    def depth(self, question: Graph) -> int:
        """Return the depth of the deepest node."""
        return max(node.depth for node in question)

    def in_order(self, question: Graph) -> Sequence[Node]:
        """Return the nodes in the order of their equations."""
        return sorted(question, key=lambda node: node.depth) if self.by_depth else question

    def encode(self, question: Graph) -> Example:
        """Return the equations one after another, each followed by a separator."""
        no_variable, no_operation = self.names, len(self.operations)
        blank = self.modulus + 1
        rows: list[tuple[int, int, int, int, int, int]] = []  # value, factors, depth, solved
        for node in self.in_order(question):
            if not node.parents:
                rows.append((node.value, _VALUE, no_variable, no_operation, 0, node.value))
            for number, parent in enumerate(node.parents):
                if number:
                    operation = self.operations.index(node.operations[number - 1])
                    rows.append((blank, _OPERATION, no_variable, operation, 0, blank))
                parent_name = question[parent].name
                rows.append((self.empty, _VARIABLE, parent_name, no_operation, 0, self.empty))
            rows.append((blank, _EQUALS, no_variable, no_operation, 0, blank))
            rows.append((self.empty, _VARIABLE, node.name, no_operation, node.depth, node.value))
            rows.append((blank, _SEPARATOR, no_variable, no_operation, 0, blank))
        table = np.array(rows, dtype=np.int64)
        tokens, factors, depth, solved = table[:, 0], table[:, 1:4], table[:, 4], table[:, 5]
        columns = {"factors": factors, "depth": depth, "solved": solved}
        return Example(tokens, solved, depth > 0, columns, steps=self.depth(question))


@dataclass(frozen=True, slots=True)
class DagChainOfThought(DagArithmetic):
    """The same graphs as plain text; the answer is the whole solution, one node after another.

    Written as `x5 = 4 ,` (values), `x5 = x3 + x0 = 4 ,` (bare_equations, the authors' `eq-val`) or
    `x5 = x3 + x0 = 1 + 3 = 4 ,` (equations), in the order of the question's equations.
    Token ids: values, variables, operations, then = , <cot>.
    """

    name: ClassVar[str] = "dag_chain_of_thought"
    columns: ClassVar[tuple[Column, ...]] = ()
    knows_depth: ClassVar[bool] = False

    thought: Thought = "values"
    """Text of a node: its value, its equation and value, or also the equation with values."""

    def __post_init__(self) -> None:
        super(DagChainOfThought, self).__post_init__()
        if self.thought not in get_args(Thought):
            choices = ", ".join(get_args(Thought))
            raise UserError(f"{self.name} thought {self.thought!r} must be one of {choices}")

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._first_mark + 3

    @property
    def model_options(self) -> dict[str, tuple[int, ...]]:
        """No options: the tokens have no factors."""
        return {}

    @property
    def _first_mark(self) -> int:
        return self.modulus + self.names + len(self.operations)

    def positions(self, nodes: int) -> int:
        """Return the positions of the longest graph of `nodes` nodes and its solution."""
        question = super(DagChainOfThought, self).positions(nodes)
        if self.thought == "values":
            return question + 4 * nodes
        equation = 2 * self.most_parents
        recalled = 2 * equation if self.thought == "equations" else equation
        return question + 4 * self.leaves + (nodes - self.leaves) * (recalled + 4)

    def encode(self, question: Graph) -> Example:
        """Return equations, `<cot>` in place of the last separator, and the solution."""
        equals, separator, thought = range(self._first_mark, self._first_mark + 3)
        prompt: list[int] = []
        solution: list[int] = []
        for node in self.in_order(question):
            variable = self.modulus + node.name
            names: list[int] = []
            values: list[int] = []
            for number, parent in enumerate(node.parents):
                if number:
                    operation = self.operations.index(node.operations[number - 1])
                    names.append(self.modulus + self.names + operation)
                    values.append(names[-1])
                names.append(self.modulus + question[parent].name)
                values.append(question[parent].value)
            prompt += [*(names or [node.value]), equals, variable, separator]
            recalled = []
            if names and self.thought != "values":
                recalled = [*names, equals]
            if names and self.thought == "equations":
                recalled += [*values, equals]
            solution += [variable, equals, *recalled, node.value, separator]
        prompt[-1] = thought
        return Example.of_sequence(prompt, solution)


def _sample(generator: random.Random, items: "range | list[int]", count: int) -> list[int]:
    """Draw distinct items in a random order.

    Uses `random()` alone, whose sequence for a seed is the same in every Python version.
    """
    left = list(items)
    return [left.pop(int(generator.random() * len(left))) for _ in range(count)]
