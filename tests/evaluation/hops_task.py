"""A task of the tests alone: paths of several hops, whose waypoints analyses look for.

a r1 r2 b: relation r leads from entity e to (e + r + 1) · 5 modulo the number of entities.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from titan_loop.data.tasks.task import Example, Task
from titan_loop.plugins import Plugin, register

ENTITIES, RELATIONS = 12, 6


class Path(NamedTuple):
    entity: int
    relations: tuple[int, ...]


@dataclass(frozen=True)
class Hops(Task):
    """Paths of one hop, each a level, to `most` hops; relations follow the entities' ids."""

    name: ClassVar[str] = "hops"
    held_out_one_in: ClassVar[int] = 4

    most: int = 5

    @property
    def vocab_size(self) -> int:
        return ENTITIES + RELATIONS

    @property
    def longest_example(self) -> int:
        return self.most + 2

    @property
    def strata(self) -> Mapping[str, int]:
        return {f"{hops}_hops": hops for hops in range(1, self.most + 1)}

    @property
    def levels(self) -> int:
        return self.most

    def choose(self, generator: random.Random, level: int) -> int:
        return 1 + int(generator.random() * (level + 1))

    def draw(self, generator: random.Random, stratum: int) -> Path:
        entity = int(generator.random() * ENTITIES)
        return Path(entity, tuple(int(generator.random() * RELATIONS) for _ in range(stratum)))

    def identity(self, question: Path) -> tuple[int, ...]:
        return (question.entity, *question.relations)

    def reached(self, question: Path) -> list[int]:
        """Return the entity after every hop."""
        entity, reached = question.entity, []
        for relation in question.relations:
            entity = (entity + relation + 1) * 5 % ENTITIES
            reached.append(entity)
        return reached

    def encode(self, question: Path) -> Example:
        relations = [ENTITIES + relation for relation in question.relations]
        return Example.of_sequence([question.entity, *relations], self.reached(question)[-1:])

    def waypoints(self, question: Path) -> Mapping[str, tuple[int, int]]:
        *bridges, target = enumerate(self.reached(question), start=1)
        return {f"hop_{hop}": (hop, entity) for hop, entity in bridges} | {"target": target}


register(Plugin(tasks={"hops": Hops}))
