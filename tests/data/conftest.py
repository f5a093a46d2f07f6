"""A prepared source made of given token ids, and a small tokenizer."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_loop.data.prepare.make_tokenizer import train_tokenizer
from titan_loop.data.shards import index_path
from titan_loop.data.source_card import ShardCard, SourceCard, SplitCard

EOS = 0
VOCAB_SIZE = 300
TEXTS = (
    "def loop(step):\n    return step + 12\n",
    "A looped model applies its layers again and again, 1024 times.",
    "<|endoftext|> spelt out in a text is only text.",
    "Größe, naïveté, 漢字 and 🙂 take several bytes each.",
)


def split_card(
    folder: Path, shards: Sequence[Sequence[Sequence[int]]], by_index: bool
) -> SplitCard:
    """Write shards (each a list of documents, each a list of ids) as datatrove would."""
    folder.mkdir(parents=True)
    cards = []
    for number, documents in enumerate(shards):
        path = folder / f"{number:05d}.ds"
        ids = np.asarray([token for document in documents for token in document], dtype="<u2")
        ids.tofile(path)
        np.cumsum([len(document) for document in documents]).astype("<u8").tofile(index_path(path))
        counts = {"documents": len(documents), "tokens": len(ids), "bytes": ids.nbytes}
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        cards.append(ShardCard(file=path.name, sha256=sha256, **counts))
    return SplitCard(
        documents=sum(card.documents for card in cards),
        tokens=sum(card.tokens for card in cards),
        text_bytes=0,
        max_token_id=max(t for documents in shards for document in documents for t in document),
        shards=tuple(cards),
        eos_only_at_ends=not by_index
        and all(
            document[-1] == EOS and document.count(EOS) == 1
            for documents in shards
            for document in documents
        ),
    )


def write_card(folder: Path, splits: dict[str, SplitCard], **changes: Any) -> None:
    """Write the card of a source with these splits."""
    fields = {"vocab_size": VOCAB_SIZE, "eos_id": EOS, "token_bytes": 2, "versions": {}}
    fields |= {"name": folder.name, "tokenizer_sha256": "same", "splits": splits}
    SourceCard(**fields | {"licence": "test", "command": "test"} | changes).write(folder)


@pytest.fixture
def write_source(tmp_path, small_tokenizer) -> Callable[..., Path]:
    """Return `write(name, shards, …)`, which gives the folder.

    With `by_index` the card does not say where EOS stands, so that ends are read from the index.
    """

    def write(
        name: str,
        shards: Sequence[Sequence[Sequence[int]]],
        held_out: Sequence[Sequence[Sequence[int]]] | None = None,
        tokenizer_sha256: str = "same",
        by_index: bool = False,
    ) -> Path:
        folder = tmp_path / name
        splits = {"train": split_card(folder / "train", shards, by_index)}
        if held_out is not None:
            splits["held_out"] = split_card(folder / "held_out", held_out, by_index)
        shutil.copyfile(small_tokenizer, folder / "tokenizer.json")
        write_card(folder, splits, tokenizer_sha256=tokenizer_sha256)
        return folder

    return write


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory) -> Path:
    """Return a JSONL file with the documents TEXTS, often enough to learn merges from."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    records = [{"text": text, "id": f"{number}"} for number, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session")
def small_tokenizer(jsonl, tmp_path_factory) -> Path:
    """Return a byte-level tokenizer of VOCAB_SIZE tokens trained on `jsonl`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer([jsonl], vocab_size=VOCAB_SIZE, output=folder)


def random_documents(seed: int, count: int, longest: int) -> list[list[int]]:
    """Return documents of random ids in 1..VOCAB_SIZE-1, each ending in EOS."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, count)
    return [[*generator.integers(1, VOCAB_SIZE, n).tolist(), EOS] for n in lengths.tolist()]


@pytest.fixture(scope="session")
def documents() -> Callable[[int, int, int], list[list[int]]]:
    """Return `random_documents`."""
    return random_documents
