"""Random knowledge graphs: all entities have equally many edges, with distinct relations."""

import random

from titan_loop.data.keyed import keyed_integer
from titan_loop.errors import UserError


def check_graph(task: str, *, entities: int, relations: int, degree: int) -> None:
    """Raise `UserError` for sizes that no graph has; `task` is its name in the message."""
    if entities < 2 or degree < 1:
        raise UserError(f"{task} entities {entities} and degree {degree} must be at least 2 and 1")
    if relations < degree:
        raise UserError(
            f"{task} relations {relations} must be at least its degree {degree}: the edges of an "
            "entity have distinct relations"
        )


def draw_edges(
    name: str, seed: int, *, entities: int, relations: int, degree: int, graphs: int = 1
) -> list[list[tuple[int, int]]]:
    """Return the (relation, tail) pairs of every entity; graphs share relations, not entities."""
    generator = random.Random(keyed_integer(name, seed))
    edges: list[list[tuple[int, int]]] = []
    for head in range(graphs * entities):
        unused, first = list(range(relations)), head - head % entities
        edges.append([])
        for _ in range(degree):
            relation = unused.pop(int(generator.random() * len(unused)))
            edges[-1].append((relation, first + int(generator.random() * entities)))
    return edges
