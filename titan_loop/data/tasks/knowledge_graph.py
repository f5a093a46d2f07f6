"""Random knowledge graphs: every entity has as many edges, each with a relation of its own."""

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
    """Return the (relation, tail) pairs of every entity.

    Args:
        entities: Entities of each graph, numbered from graph to graph.
        relations: Relations, shared by all graphs.
        degree: Edges that leave an entity.
    """
    generator = random.Random(keyed_integer(name, seed))
    edges = []
    for head in range(graphs * entities):
        unused, first = list(range(relations)), head - head % entities
        edges.append(
            [
                (
                    unused.pop(int(generator.random() * len(unused))),
                    first + int(generator.random() * entities),
                )
                for _ in range(degree)
            ]
        )
    return edges
