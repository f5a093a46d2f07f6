"""Pipelines of one's own for `dataloader.pipeline`: some that work, and some that do not."""

import random
from typing import Any

import numpy as np
import torch
import torchdata.nodes as nodes
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

SEQ_LEN = 32
TEXTS = [" ".join(f"word {i} of {j}" for j in range(i % 7 + 1)) for i in range(300)]
IDS = [[3 + (i + j) % 200 for j in range(i % 30 + 1)] for i in range(300)]


def texts(rank: int, ranks: int) -> Any:
    return nodes.Prefetcher(nodes.IterableWrapper(["", "  ", *TEXTS][rank::ranks]), 3)


def ids(rank: int, ranks: int) -> Any:
    return nodes.IterableWrapper([{"ids": each} for each in IDS[rank::ranks]])


def shuffled_batches(rank: int, ranks: int) -> Any:
    """Two workers, batches of four documents, a shuffled map-style data set."""
    data: Any = Dataset.from_dict({"text": TEXTS}).shard(ranks, rank)
    generator = torch.Generator().manual_seed(rank)
    return StatefulDataLoader(data, 4, shuffle=True, num_workers=2, generator=generator)


class Draws(nodes.BaseNode[list[int]]):
    """Ids drawn by Python's and numpy's generators, whose states are tuples."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.python, self.numpy = random.Random(0), np.random.RandomState(0)
        if initial_state is not None:
            self.python.setstate(initial_state["python"])
            self.numpy.set_state(initial_state["numpy"])

    def next(self) -> list[int]:
        return [self.python.randrange(200), *self.numpy.randint(0, 200, SEQ_LEN)]

    def get_state(self) -> dict[str, Any]:
        return {"python": self.python.getstate(), "numpy": self.numpy.get_state()}


def drawn(rank: int, ranks: int) -> Any:
    return nodes.Batcher(Draws(), 3)


class Rows(torch.utils.data.Dataset[list[int]]):
    """Half a window each. Those of the last rank end, fail or are faulty at item `broken_at`."""

    broken_at = 10_000

    def __init__(self, kind: str, rank: int, ranks: int) -> None:
        self.kind, self.rank, self.ranks = kind, rank, ranks
        self.good = self.broken_at // ranks if rank == ranks - 1 else 10_000

    def __len__(self) -> int:
        return self.good if self.kind == "end" else 10_000

    def __getitem__(self, index: int) -> list[int]:
        if index >= self.good and self.kind == "fail":
            raise OSError("the disk is gone")
        if index >= self.good and self.kind == "fault":
            return [4000]
        return [3 + (index * self.ranks + self.rank + j) % 200 for j in range(SEQ_LEN // 2 - 1)]


def ending(rank: int, ranks: int) -> Any:
    return StatefulDataLoader(Rows("end", rank, ranks), batch_size=None)


def failing(rank: int, ranks: int) -> Any:
    return nodes.Mapper(nodes.IterableWrapper(range(10_000)), Rows("fail", rank, ranks).__getitem__)


def faulty(rank: int, ranks: int) -> Any:
    """Batches of two, of which the second is faulty."""
    rows = Rows("fault", rank, ranks)
    return nodes.Batcher(nodes.Mapper(nodes.IterableWrapper(range(10_000)), rows.__getitem__), 2)


def not_a_pipeline(rank: int, ranks: int) -> Any:
    return TEXTS


class Plain(torch.utils.data.IterableDataset[str]):
    def __iter__(self) -> Any:
        yield from TEXTS


def without_state(rank: int, ranks: int) -> Any:
    return StatefulDataLoader(Plain(), batch_size=None)


def not_built(rank: int, ranks: int) -> Any:
    raise FileNotFoundError("no corpus here")


class RaisingData(torch.utils.data.Dataset[str]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        if index == 7:
            raise ValueError("document 7 is torn")
        return TEXTS[index]


def raises_in_a_worker(rank: int, ranks: int) -> Any:
    return StatefulDataLoader(RaisingData(), batch_size=None, num_workers=1)


def _nonsense(item: Any) -> Any:
    return lambda rank, ranks: nodes.IterableWrapper([item])


floats = _nonsense(0.5)
nothing = _nonsense(None)
half = _nonsense("a\ud83d b")
other_fields = _nonsense({"content": "text", "url": "x"})
wrong_id = _nonsense({"ids": [5, 4000]})


class Unseeded(nodes.BaseNode[str]):
    def next(self) -> str:
        return str(random.SystemRandom().random())

    def get_state(self) -> dict[str, Any]:
        return {}


def unseeded(rank: int, ranks: int) -> Any:
    return Unseeded()
