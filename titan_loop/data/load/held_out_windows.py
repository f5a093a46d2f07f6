"""The fixed held-out windows that evaluation reads."""

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from titan_loop.data.keyed import keyed_integer
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.windows import CutWindows, empty_batch
from titan_loop.data.prefix import prefix_of
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError, require_at_least
from titan_loop.models.context import PREFIX
from titan_loop.ranks import warn_together
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer, token_byte_lengths

logger = logging.getLogger(__name__)


class HeldOutWindows(NamedTuple):
    """Fixed windows for evaluation; `input`, `positions` and `labels` as in training.

    Attributes:
        label_bytes: Bytes of text behind each label, (n, L) int64; 0 where ignored and for special
            tokens. Summed cross entropy divided by their sum is nats per byte.
        columns: Further columns for the model; `whole` names those with one value per window.
        documents: Number of the document that each window begins in; empty if each is one.
    """

    input: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    label_bytes: torch.Tensor
    columns: Mapping[str, torch.Tensor] = {}
    whole: Collection[str] = ()
    documents: Sequence[int] = ()

    def columns_for(self, wanted: Collection[str]) -> Mapping[str, torch.Tensor] | None:
        """Return all columns, and the prefix if it is `wanted`; None if there are none."""
        columns = dict(self.columns)
        if PREFIX in wanted:
            columns[PREFIX] = prefix_of(self.positions, self.labels)
        return columns or None

    def rows(self, chosen: Sequence[int], device: torch.device) -> "HeldOutWindows":
        """Return the `chosen` windows on a device, without their `documents`."""
        rows = [*chosen]
        return HeldOutWindows(
            *(values[rows].to(device) for values in self[:4]),
            columns={name: values[rows].to(device) for name, values in self.columns.items()},
            whole=self.whole,
        )


def why_not_scored(source_path: str | Path, seq_len: int) -> str:
    """Return why a source's held-out split fills no window of L tokens; empty if it fills one."""
    card = SourceCard.read(Path(source_path))
    split = card.splits.get("held_out")
    if split is None or not split.tokens:
        return f"source {source_path} holds out no document"
    if split.tokens > seq_len:
        # Older preparations, whose cards have no round trip, stored no bytes.
        if card.round_trip or _has_byte_table(Path(source_path), card.tokenizer_sha256):
            return ""
        return (
            f"source {source_path} was prepared by an older version, which did not store the bytes "
            "behind the tokens of a tokenizer that is not byte-level"
        )
    return (
        f"source {source_path} holds out {split.tokens} tokens, less than one window of "
        f"training.seq_len + 1 = {seq_len + 1}"
    )


@lru_cache(maxsize=64)
def _has_byte_table(source: Path, sha256: str) -> bool:
    return token_byte_lengths(load_tokenizer(source / TOKENIZER_NAME)) is not None


def held_out_windows(source_path: str | Path, *, seq_len: int, count: int) -> HeldOutWindows:
    """Return `count` windows of a source's held-out split, or all with a warning if it has fewer.

    They are always the same ones, in the same order. Where documents begin with BOS, so does every
    window, also one that begins inside a document: models such as Gemma read little without it.
    """
    require_at_least(1, **{"held-out window count": count})
    shards = TokenShards(source_path, "held_out")
    source = CutWindows(shards, seq_len, keyed_integer("held_out", 0))
    if source.windows_per_epoch < count:
        warn_together(
            logger,
            f"source {source_path} has only {source.windows_per_epoch} of the {count} held-out "
            "windows wanted",
        )
        count = source.windows_per_epoch
    epochs, numbers = source.locate(np.arange(count))
    (inputs, labels), windows = empty_batch(count, seq_len)
    for epoch, number, window in zip(epochs.tolist(), numbers.tolist(), windows, strict=True):
        source.read_into(epoch, number, window)
    card = SourceCard.read(Path(source_path))
    if card.bos_id is not None and not card.has_loss_mask:  # conversations begin as they please
        inputs["input"][:, 0] = card.bos_id
    starts = [*map(source.start, epochs.tolist(), numbers.tolist())]
    label_bytes = np.stack([shards.read_bytes(start + 1, seq_len) for start in starts])
    label_bytes[labels.numpy() == IGNORED] = 0
    if not label_bytes.any():
        raise UserError(
            f"source {source_path}: none of its {count} held-out windows has a label, so there is "
            "no loss to report: ask for more windows or hold out more documents"
        )
    return HeldOutWindows(
        inputs["input"],
        inputs["positions"],
        labels,
        torch.from_numpy(label_bytes),
        documents=[shards.document_of(start) for start in starts],
    )
