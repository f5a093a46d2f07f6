"""Stored documents as text: what the model reads, with boundaries and loss masks."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_loop.data.shards import TokenShards
from titan_loop.errors import UserError
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer

TARGET_START, TARGET_END = "⟦", "⟧"


class StoredDocument(NamedTuple):
    """One document of a source.

    It takes the split's tokens from `first_token` on, `tokens` of them. `targets` of those are
    targets of the loss; None without a mask, when all but the document's first are. `text` has
    special tokens written out, and targets in ⟦ ⟧ where there is a mask.
    """

    number: int
    first_token: int
    tokens: int
    targets: int | None
    text: str


def show_source(
    source: str | Path, count: int = 3, split: str = "train"
) -> Iterator[StoredDocument]:
    """Yield the first `count` stored documents of a prepared source.

    Raises:
        UserError: If the source or its tokenizer is unusable, or `count` is below 1.
    """
    if count < 1:
        raise UserError(f"count {count} must be at least 1")
    shards = TokenShards(source, split)
    tokenizer = load_tokenizer(Path(source) / TOKENIZER_NAME)
    first_token = 0
    for number in range(min(count, shards.split.documents)):
        ids = shards.document(number)
        mask = shards.read_mask(first_token, len(ids))
        text = ""
        for start, end in pairwise([0, *_changes(mask), len(ids)]):
            part = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
            is_target = mask is not None and mask[start]
            text += f"{TARGET_START}{part}{TARGET_END}" if is_target else part
        targets = None if mask is None else int(mask.sum())
        yield StoredDocument(number, first_token, len(ids), targets, text)
        first_token += len(ids)


def _changes(mask: np.ndarray | None) -> list[int]:
    return [] if mask is None else (np.flatnonzero(np.diff(mask)) + 1).tolist()
