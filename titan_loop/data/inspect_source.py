"""Inspects a prepared source: documents as the model reads them, and files against the card."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from titan_loop.data.packed_index import PIECE, WINDOW_END
from titan_loop.data.shards import TokenShards, file_chunks, index_path, misplaced_eos
from titan_loop.data.source_card import (
    BYTES_SUFFIX,
    INDEX_SUFFIX,
    LOSS_SUFFIX,
    ShardCard,
    SourceCard,
    file_sha256,
    index_paths,
)
from titan_loop.errors import require_at_least
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer


class StoredDocument(NamedTuple):
    """A document of a split; `targets` counts its trained tokens, None without a loss mask."""

    number: int
    first_token: int
    tokens: int
    targets: int | None
    text: str

    def __str__(self) -> str:
        targets = "" if self.targets is None else f", {self.targets} targets"
        return (
            f"--- document {self.number}: {self.tokens} tokens from token {self.first_token} on"
            f"{targets}\n{self.text}"
        )


def show_source(
    source: str | Path, *, count: int = 3, split: Literal["train", "held_out"] = "train"
) -> Iterator[StoredDocument]:
    """Print documents of a prepared source as the model reads them.

    Special tokens are written out, and a text that spells one has a backslash before it; if there
    is a loss mask, targets stand in ⟦ ⟧.

    Args:
        source: Folder of the source.
        count: Number of documents, counted from the first stored one.
        split: Split to read.
    """
    require_at_least(1, count=count)
    shards = TokenShards(source, split)
    tokenizer = load_tokenizer(Path(source) / TOKENIZER_NAME)
    added = tokenizer.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    spelt = re.compile("|".join(map(re.escape, special.values())) or "(?!)")

    def written(ids: np.ndarray) -> str:
        text = ""
        for is_special, run in groupby(ids.tolist(), key=special.__contains__):
            if is_special:
                text += "".join(special[number] for number in run)
            else:
                text += spelt.sub(r"\\\g<0>", tokenizer.decode([*run], False))
        return text

    first_token = 0
    for number in range(min(count, shards.split.documents)):
        ids = shards.document(number)
        mask = shards.read_mask(first_token, len(ids))
        text = ""
        changes = [] if mask is None else (np.flatnonzero(np.diff(mask)) + 1).tolist()
        for start, end in pairwise([0, *changes, len(ids)]):
            part = written(ids[start:end])
            is_target = mask is not None and mask[start]
            text += f"⟦{part}⟧" if is_target else part
        targets = None if mask is None else int(mask.sum())
        yield StoredDocument(number, first_token, len(ids), targets, text)
        first_token += len(ids)


def verify_source(source: str | Path) -> Iterator[str]:
    """Yield one line for each fault of a prepared source; nothing if it is sound.

    Sizes, checksums, ids, document ends and masks are compared with the card. Every byte is read.
    """
    source = Path(source)
    card = SourceCard.read(source)
    yield from _file(source / TOKENIZER_NAME, None, card.tokenizer_sha256)
    for name, split in card.splits.items():
        folder = source / name
        sizes = card.shard_files(name)
        for shard in split.shards:
            yield from _shard(folder / shard.file, shard, card, sizes)
        for field in ("documents", "tokens"):
            total = sum(getattr(shard, field) for shard in split.shards)
            if total != getattr(split, field):
                yield f"{name}: the card counts {getattr(split, field)} {field}, its shards {total}"
        for packed in split.packed:
            windows_path, pieces_path = index_paths(folder, packed.seq_len)
            windows_bytes = packed.windows * WINDOW_END.itemsize
            yield from _file(windows_path, windows_bytes, packed.windows_sha256)
            yield from _file(pieces_path, packed.pieces * PIECE.itemsize, packed.pieces_sha256)


def _shard(
    path: Path, shard: ShardCard, card: SourceCard, sizes: Mapping[str, int]
) -> Iterator[str]:
    beside = {"": shard.sha256, INDEX_SUFFIX: shard.index_sha256}
    if card.has_loss_mask:
        beside[LOSS_SUFFIX] = shard.loss_sha256
    if shard.bytes_sha256:
        beside[BYTES_SUFFIX] = shard.bytes_sha256
    sound = True
    for suffix, sha256 in beside.items():
        file = path.with_name(path.name + suffix)
        for fault in _file(file, sizes[f"{path.parent.name}/{file.name}"], sha256):
            sound = sound and "SHA-256" in fault  # a wrong checksum leaves the contents readable
            yield fault
    if sound:
        yield from _contents(path, path.with_name(path.name + LOSS_SUFFIX), shard, card)


def _file(path: Path, expected_bytes: int | None, sha256: str) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: missing"
        return
    found_bytes = path.stat().st_size
    if expected_bytes is not None and found_bytes != expected_bytes:
        yield f"{path}: {found_bytes} bytes, the card says {expected_bytes}"
        return
    if (found := file_sha256(path)) != sha256:
        yield f"{path}: SHA-256 {found[:12]}…, the card says {sha256[:12]}…"


def _contents(path: Path, mask: Path, shard: ShardCard, card: SourceCard) -> Iterator[str]:
    ends = np.fromfile(index_path(path), dtype="<u8").astype(np.int64)
    if int(ends[-1:].sum()) != shard.tokens or (np.diff(ends, prepend=0) < 1).any():
        yield f"{index_path(path)}: document ends do not ascend to token {shard.tokens}"
        return
    outside = unended = start = not_binary = 0
    for chunk in file_chunks(path, f"<u{card.token_bytes}"):
        outside += int((chunk >= card.vocab_size).sum())
        unended += misplaced_eos(chunk, start, ends, card.eos_id)
        start += len(chunk)
    if card.has_loss_mask:
        not_binary = sum(int((chunk > 1).sum()) for chunk in file_chunks(mask, "u1"))
    if outside:
        yield f"{path}: {outside} token ids outside the vocabulary of {card.vocab_size}"
    # EOS may also be the BOS, or end every turn of a chat.
    may_repeat = card.eos_id == card.bos_id or card.has_loss_mask
    if unended and (card.splits[path.parent.name].eos_only_at_ends or not may_repeat):
        yield f"{path}: {unended} places where document ends and EOS id {card.eos_id} disagree"
    if not_binary:
        yield f"{mask}: {not_binary} bytes are neither 0 nor 1"
