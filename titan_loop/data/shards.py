"""Reading a split's `.ds` shards as one long stream of tokens, addressed by global token offset.

The format is datatrove's: `.ds` holds little-endian token ids of 2 or 4 bytes, `.ds.index` the ends
of its documents (uint64, in tokens, from the start of the shard), `.ds.loss`, where the card says
so, a byte per token that is 0 where nothing is learnt, and `.ds.bytes`, where the card says so, the
bytes of text behind each token (uint32). Opening a source costs one `stat` per file.

Where the split's card says that EOS stands at the ends of documents and nowhere else, a window is
one read and its ends are its EOS tokens. Otherwise they are looked up in the index.
"""

import bisect
import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from titan_loop.data.open_files import OpenFiles
from titan_loop.data.source_card import (
    BYTES_SUFFIX,
    INDEX_SUFFIX,
    LOSS_SUFFIX,
    TOKEN_BYTES,
    SourceCard,
)
from titan_loop.errors import UserError
from titan_loop.storage.transient import retried
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer, token_byte_lengths

_BYTE = np.dtype(np.uint8)
_TOKEN_BYTES = np.dtype(TOKEN_BYTES)
_DOCUMENT_END = np.dtype("<i8")  # written unsigned; no shard has 2**63 tokens
_INDEX_BLOCK = 2048  # document ends read at once
_CHUNK_BYTES = 1 << 24


class TokenShards:
    """One split of a prepared source, whose files must have the sizes that its card says.

    Reading raises `UserError` if a file disappeared, an id lies outside the vocabulary, or an index
    is damaged. `disk_bytes` is the size of the split's shards and of the files beside them.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        *,
        card: SourceCard | None = None,
        files: OpenFiles | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.card = SourceCard.read(self.folder) if card is None else card
        if split not in self.card.splits or not self.card.splits[split].tokens:
            fix = "add documents to it"
            if split == "held_out":
                fix = "prepare it with a larger --held-out-fraction"
            raise UserError(f"source {folder} has no tokens in its split {split!r}: {fix}")
        self.name = split
        self.split = self.card.splits[split]
        self.tokens = self.split.tokens
        if self.split.max_token_id >= self.card.vocab_size:
            raise UserError(
                f"source {folder}: token id {self.split.max_token_id} is outside its vocabulary of "
                f"{self.card.vocab_size}: prepare it again with the right tokenizer"
            )
        self._dtype = np.dtype(f"<u{self.card.token_bytes}")
        self._paths = [f"{self.folder / split}/{shard.file}" for shard in self.split.shards]
        self._index_paths = [path + INDEX_SUFFIX for path in self._paths]
        # Arrays, because the card objects of thousands of shards do not stay in the CPU's caches.
        self._starts = array("q", [0, *accumulate(shard.tokens for shard in self.split.shards)])
        self._documents = array("q", [shard.documents for shard in self.split.shards])
        self._index_is_checked = bytearray(len(self._documents))
        if self._starts[-1] != self.tokens:
            raise UserError(
                f"source {folder}: shards of {split!r} hold {self._starts[-1]} tokens, the card "
                f"says {self.tokens}: prepare it again"
            )
        self.files = OpenFiles() if files is None else files
        self.disk_bytes = self._require_sizes()

    def _require_sizes(self) -> int:
        size_bytes = 0
        for name, expected_bytes in self.card.shard_files(self.name).items():
            file = f"{self.folder}/{name}"
            try:
                found_bytes = retried(lambda file=file: os.stat(file).st_size)
            except FileNotFoundError:
                raise UserError(
                    f"shard {file} is missing: restore it or prepare the source again"
                ) from None
            if found_bytes != expected_bytes:
                raise UserError(
                    f"shard {file} has {found_bytes} bytes, its card says {expected_bytes}: it was "
                    "truncated or replaced; restore it or prepare the source again"
                )
            size_bytes += found_bytes
        return size_bytes

    def contents(self) -> str:
        """Return a digest of the card's checksums: 32 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.split.shards:
            digest.update(f"{shard.sha256}{shard.index_sha256}{shard.loss_sha256}".encode())
        return digest.hexdigest()

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read `count` tokens from global offset `start`.

        Returns:
            The ids as stored (read only, uint16 or uint32, shape (count,)) and the document ends
            (int64, ascending, each in 1..count): token start + e - 1 ends its document.
        """
        parts = self._parts(start, count)
        ids = self._ids(start, parts)
        if self.split.eos_only_at_ends:
            return ids, (ids == self.card.eos_id).nonzero()[0] + 1
        return ids, _joined([self._ends_within(*part) for part in parts])

    def read_ids(self, start: int, count: int) -> np.ndarray:
        """Return the ids alone, as `read` does."""
        return self._ids(start, self._parts(start, count))

    def _ids(self, start: int, parts: list[tuple[int, int, int, int]]) -> np.ndarray:
        ids = _joined([self._tokens_of(shard, first, last) for shard, first, last, _ in parts])
        if int(ids.max()) >= self.card.vocab_size:
            raise UserError(
                f"source {self.folder}: token id {int(ids.max())} near token {start} is outside "
                f"the vocabulary of {self.card.vocab_size}: a shard was changed; prepare it again"
            )
        return ids

    def read_mask(self, start: int, count: int) -> np.ndarray | None:
        """Return the loss mask of these tokens (uint8, 1 for possible labels), if there is one."""
        if not self.card.has_loss_mask:
            return None
        masks = [
            self.files.read(self._paths[shard] + LOSS_SUFFIX, _BYTE, first, last - first)
            for shard, first, last, _ in self._parts(start, count)
        ]
        return _joined(masks)

    def read_bytes(self, start: int, count: int) -> np.ndarray:
        """Return the bytes of text behind each of these tokens (int64).

        Raises `UserError` if they are not stored and the tokenizer's table does not give them.
        """
        parts: list[np.ndarray] = []
        for shard, first, last, _ in self._parts(start, count):
            if self.split.shards[shard].bytes_sha256:
                path = self._paths[shard] + BYTES_SUFFIX
                parts.append(self.files.read(path, _TOKEN_BYTES, first, last - first))
            else:
                parts.append(self._byte_table[self._tokens_of(shard, first, last)])
        return _joined(parts).astype(np.int64)

    @cached_property
    def _byte_table(self) -> np.ndarray:
        path = self.folder / TOKENIZER_NAME
        table = token_byte_lengths(load_tokenizer(path))
        if table is None:
            raise UserError(
                f"source {self.folder} was prepared by an older version, which did not store the "
                f"bytes behind its tokens, and {path} is not byte-level: prepare it again"
            )
        return table

    def document(self, number: int) -> np.ndarray:
        """Return the ids (int64) of the document at `number` in stored order, its EOS included."""
        for shard, card in enumerate(self.split.shards):
            if number < card.documents:
                first = int(self._index(shard, number - 1, 1)[0]) if number else 0
                last = int(self._index(shard, number, 1)[0])
                return self._tokens_of(shard, first, last).astype(np.int64)
            number -= card.documents
        raise IndexError(number)

    def document_of(self, token: int) -> int:
        """Return the number in stored order of the document that the split's token belongs to."""
        ((shard, first, _, _),) = self._parts(token, 1)
        return sum(self._documents[:shard]) + self._document_at(shard, first)

    def _parts(self, start: int, count: int) -> list[tuple[int, int, int, int]]:
        """Return (shard, first token, last token + 1, tokens before) of each shard touched."""
        assert 0 <= start < start + count <= self.tokens, (start, count, self.tokens)
        parts: list[tuple[int, int, int, int]] = []
        shard = bisect.bisect_right(self._starts, start) - 1
        done = 0
        while done < count:
            first = start + done - self._starts[shard]
            take = min(count - done, self._starts[shard + 1] - self._starts[shard] - first)
            if take:  # a shard may be empty
                parts.append((shard, first, first + take, done))
            done += take
            shard += 1
        return parts

    def _ends_within(self, shard: int, first: int, last: int, before: int) -> np.ndarray:
        if not self._index_is_checked[shard]:
            self._check_index(shard)
        stop = self._document_at(shard, first)
        blocks = [self._index(shard, stop, _INDEX_BLOCK)]
        while blocks[-1][-1] <= last and (stop := stop + _INDEX_BLOCK) < self._documents[shard]:
            blocks.append(self._index(shard, stop, _INDEX_BLOCK))
        ends = _joined(blocks)
        return ends[: ends.searchsorted(last, side="right")] - (first - before)

    def _document_at(self, shard: int, token: int) -> int:
        """Return the number in the shard of the document that its `token` belongs to."""
        starts = range(0, self._documents[shard], _INDEX_BLOCK)
        block = bisect.bisect_right(
            starts, token, key=lambda start: self._index(shard, start, 1)[0]
        )
        start = starts[max(0, block - 1)]
        ends = self._index(shard, start, _INDEX_BLOCK)
        return start + int(ends.searchsorted(token, side="right"))

    def _tokens_of(self, shard: int, first: int, last: int) -> np.ndarray:
        return self.files.read(self._paths[shard], self._dtype, first, last - first)

    def _index(self, shard: int, first: int, count: int) -> np.ndarray:
        """Return at most `count` document ends from number `first`."""
        documents, tokens = self._documents[shard], self._starts[shard + 1] - self._starts[shard]
        count = min(count, documents - first)
        before, after = int(first > 0), int(first + count < documents)
        path = self._index_paths[shard]
        ends = self.files.read(path, _DOCUMENT_END, first - before, before + count + after)
        if ends[0] <= 0 or ends[-1] > tokens or (ends[1:] <= ends[:-1]).any():
            problem = f"index {path} does not ascend"
            raise UserError(f"{problem}: restore it or prepare the source again")
        return ends[before : before + count]

    def _check_index(self, shard: int) -> None:
        card, path = self.split.shards[shard], self._index_paths[shard]
        end = int(self.files.read(path, _DOCUMENT_END, card.documents - 1, 1)[0])
        if end != card.tokens:
            problem = f"index {path} ends at token {end}, its shard has {card.tokens}"
            raise UserError(f"{problem}: prepare the source again")
        self._index_is_checked[shard] = 1


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def index_path(shard: Path) -> Path:
    """Return the path of a shard's document index."""
    return shard.with_name(shard.name + INDEX_SUFFIX)


def misplaced_eos(ids: np.ndarray, first: int, ends: np.ndarray, eos_id: int) -> int:
    """Count the EOS tokens that end no document, and the other tokens that end one."""
    low, high = np.searchsorted(ends, [first, first + len(ids)], side="right")
    eos = np.flatnonzero(ids == eos_id)
    return len(np.setxor1d(eos, ends[low:high] - 1 - first, assume_unique=True))


def file_chunks(path: Path, dtype: str) -> Iterator[np.ndarray]:
    """Yield all values of a file in arrays of at most 16 MB."""
    value = np.dtype(dtype)
    for start in range(0, path.stat().st_size, _CHUNK_BYTES):
        yield np.fromfile(path, dtype=value, count=_CHUNK_BYTES // value.itemsize, offset=start)
