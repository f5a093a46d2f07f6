"""The step that turns documents into token files: ids, and the bytes of tokens to be scored.

datatrove's own tokenizer encodes a special token that is spelt out in a text as that token, keeps
the encodings of 10,000 documents in memory, and knows nothing of the text behind a token.
"""

from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile
from tokenizers import Tokenizer

from titan_loop.data.source_card import BYTES_SUFFIX, TOKEN_BYTES
from titan_loop.text.encoding import DocumentEncoder
from titan_loop.text.tokenizer import require_token

CHANGED = "changed "
"""Beginning of the name of a statistic that tells how a document came back."""

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1000
_ALL_DECODED = 100  # the first documents of a task; of the others, every _STRIDE-th is decoded
_STRIDE = 100
_CONTEXT = 15  # characters shown on either side of a change


class PlainTextTokenizer(DocumentTokenizer):
    """Encodes a special token spelt out in a document as text; counts UTF-8 bytes: `text_bytes`.

    Of a sample of documents, `decoded`, it counts the ones that their tokens do not give back,
    `changed`; the first one has a statistic of its own, whose name tells the change.

    Args:
        bos_token: Token in front of every document; None for none.
        keep_bytes: Whether to write the bytes behind each token, unless the tokenizer's table
            gives them.
    """

    def __init__(
        self, *args: Any, bos_token: str | None = None, keep_bytes: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.bos_token = bos_token
        self.keep_bytes = keep_bytes
        self._number = 0  # of the documents so far
        self._told = False

    @cached_property
    def encoder(self) -> DocumentEncoder:
        """Return the encoder; loaded when first used, in the task's own process."""
        assert self.tokenizer_name_or_path is not None
        return DocumentEncoder(self.tokenizer_name_or_path)

    @cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the tokenizer, set to encode everything as plain text."""
        return self.encoder.tokenizer

    def write_unshuffled(self, data: Any, filename: str) -> TokenizedFile:
        """Tokenise documents into a file."""
        assert self.eos_token is not None
        file = self.new_file(filename)
        begin, end = self._begin(), [require_token(self.tokenizer, self.eos_token, "eos_token")]
        for batch in _batches(data):
            for document, ids in zip(
                batch, self.encoder.ids([document.text for document in batch]), strict=True
            ):
                self.stat_update("tokens", value=len(begin) + len(ids) + 1)
                if self.count(document):
                    self.compare(document, [(document.text, ids)])
                ids_of_file = np.concatenate([begin, ids, end])
                file.write_bytes(ids_of_file.astype(f"<u{self.token_size}").tobytes())
                if self.keep_bytes:
                    file.write_token_bytes(self._stored_bytes(document.text, ids, len(begin)))
        file.close()
        return file

    def new_file(self, filename: str) -> "CountedFile":
        """Return an empty file for this task's tokens."""
        return CountedFile(
            self.output_folder,
            filename,
            save_loss_metadata=self.save_loss_metadata,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
            save_final_metadata=self.save_final_metadata,
            token_size=self.token_size,
        )

    def _begin(self) -> list[int]:
        if self.bos_token is None:
            return []
        return [require_token(self.tokenizer, self.bos_token, "bos_token")]

    def text_bytes(self, text: str, ids: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the bytes of a text behind each of its ids, and whether they are the table's."""
        n_bytes = len(text.encode())
        if not n_bytes:
            return np.zeros(len(ids)), True
        if self.encoder.is_exact(ids, n_bytes):
            assert self.encoder.table is not None
            return self.encoder.table[ids], True
        found = self.encoder.bytes_of_tokens(text)
        if len(found) != len(ids):  # other ids than of the text alone, as in the middle of a chat
            found = np.diff(np.linspace(0, n_bytes, len(ids) + 1).astype(np.int64))
        return found, False

    def _stored_bytes(self, text: str, ids: np.ndarray, before: int) -> tuple[np.ndarray, bool]:
        found, is_exact = self.text_bytes(text, ids)
        lost = len(text.encode()) - int(found.sum())  # of a text without a token, on its EOS
        return np.concatenate([np.zeros(before), found, [lost]]), is_exact

    def count(self, document: Document) -> bool:
        """Count a document's bytes; return whether it is of the sample."""
        self.stat_update("text_bytes", value=len(document.text.encode()))
        self._number += 1
        return self._number <= _ALL_DECODED or self._number % _STRIDE == 0

    def compare(self, document: Document, parts: Sequence[tuple[str, Any]]) -> None:
        """Decode the parts of a document of the sample; note the first one that is changed.

        What precedes a part decides whether SentencePiece's decoder gives the space before it.
        """
        self.stat_update("decoded")
        alone = len(parts) == 1
        for text, ids in parts:
            decoded = self.tokenizer.decode([*map(int, ids)], skip_special_tokens=False)
            if decoded == text or (not alone and decoded.lstrip(" ") == text.lstrip(" ")):
                continue
            self.stat_update("changed")
            if not self._told:
                self._told = True
                self.stat_update(f"{CHANGED}{document.id}: {_first_change(text, decoded)}")
            return


class CountedFile(TokenizedFile):
    """A token file with a file of `TOKEN_BYTES` beside it, where the tokenizer's table is wrong."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bytes_file: Any = None
        self._needs_bytes = False

    def write_token_bytes(self, counted: tuple[np.ndarray, bool]) -> None:
        """Append the bytes of a document's tokens, and whether the tokenizer's table gives them."""
        n_bytes, is_exact = counted
        if self._bytes_file is None:
            self._bytes_file = self.output_folder.open(self.filename + BYTES_SUFFIX, mode="wb")
        self._bytes_file.write(n_bytes.astype(TOKEN_BYTES).tobytes())
        self._needs_bytes |= not is_exact

    def close(self) -> None:
        """Close the files and save the index."""
        super().close()
        if self._bytes_file is not None:
            self._bytes_file.close()

    def copy(self, save_filename: str, ordering: np.ndarray, *args: Any, **options: Any) -> Any:
        """Write the documents in another order, with their bytes if the table is wrong."""
        shuffled = super().copy(save_filename, ordering, *args, **options)
        path = shuffled.filename + BYTES_SUFFIX
        if shuffled.output_folder.exists(path):
            shuffled.output_folder.rm_file(path)  # of an interrupted attempt
        if self._needs_bytes:
            starts, size = [0, *self.doc_ends], np.dtype(TOKEN_BYTES).itemsize
            with (
                self.output_folder.open(self.filename + BYTES_SUFFIX, mode="rb") as file,
                shuffled.output_folder.open(path, mode="wb") as target,
            ):
                for number in ordering:
                    file.seek(starts[number] * size)
                    target.write(file.read((starts[number + 1] - starts[number]) * size))
        return shuffled

    def cleanup(self) -> None:
        """Remove the files."""
        super().cleanup()
        if self._bytes_file is not None:
            self.output_folder.rm_file(self.filename + BYTES_SUFFIX)


def _batches(documents: Iterable[Document]) -> Generator[list[Document], None, None]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _first_change(text: str, decoded: str) -> str:
    same = next(
        (place for place, pair in enumerate(zip(text, decoded, strict=False)) if len({*pair}) > 1),
        min(len(text), len(decoded)),
    )
    start = max(0, same - _CONTEXT)
    parts = (whole[start : same + _CONTEXT] for whole in (text, decoded))
    return " comes back as ".join(map(repr, parts))
