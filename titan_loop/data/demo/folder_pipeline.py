r"""A pipeline of one's own over a folder of JSONL files: `datasets` reads, torchdata feeds.

    export PIPELINE_FOLDER=corpus/prose
    titan-loop train quickstart --dataloader.pipeline titan_loop.data.demo.folder_pipeline:endless \
        --dataloader.tokenizer-path tokenizer.json --held-out.interval 0
    titan-loop data tokenize --pipeline titan_loop.data.demo.folder_pipeline:once \
        --output sources/prose --tokenizer tokenizer.json

Documents are shuffled by number, anew in every epoch. The buffer of a streaming
`IterableDataset.shuffle` is not part of its state: after a restart its documents would be missing.
"""

import os
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torchdata.nodes import BaseNode, IterableWrapper, ParallelMapper

WORKERS = 2


class EndlessShuffle(BaseNode[int]):
    """Yields 0..count-1 in a new order every epoch, without end; its state is two numbers."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        self._count, self._seed = count, seed
        self._epoch = self._next = 0
        self._order: list[int] = []

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to a state, or to the beginning."""
        super().reset(initial_state)
        state = initial_state or {"epoch": 0, "next": 0}
        self._epoch, self._next = state["epoch"], state["next"]
        self._shuffle()

    def next(self) -> int:
        """Return the next number."""
        if self._next == self._count:
            self._epoch, self._next = self._epoch + 1, 0
            self._shuffle()
        self._next += 1
        return self._order[self._next - 1]

    def get_state(self) -> dict[str, Any]:
        """Return the place in the stream."""
        return {"epoch": self._epoch, "next": self._next}

    def _shuffle(self) -> None:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._order = torch.randperm(self._count, generator=generator).tolist()


def endless(rank: int, ranks: int) -> BaseNode[str]:
    """Return this rank's share of the folder, again and again."""
    texts = _texts(rank, ranks)
    numbers = EndlessShuffle(len(texts), seed=0)
    return ParallelMapper(numbers, texts.__getitem__, num_workers=WORKERS, in_order=True)


def once(rank: int, ranks: int) -> BaseNode[str]:
    """Return this rank's share of the folder, in the order of the files."""
    return IterableWrapper(_texts(rank, ranks))


def _texts(rank: int, ranks: int) -> Any:
    files = sorted(map(str, Path(os.environ["PIPELINE_FOLDER"]).glob("*.jsonl")))
    dataset = load_dataset("json", data_files=files, split="train")
    return dataset.shard(ranks, rank)["text"]
