"""The steps that we hand to datatrove: held-out documents, signatures, token files."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.text import simplify_text
from tokenizers import Tokenizer

from titan_loop.data.keyed import keyed_uniform
from titan_loop.data.prepare.chat_records import conversation_of
from titan_loop.data.source_card import BYTES_SUFFIX, TOKEN_BYTES
from titan_loop.text.chat_encoding import ChatEncoder, Piece
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.encoding import DocumentEncoder
from titan_loop.text.tokenizer import require_token

CHANGED = "changed "
"""Beginning of the name of a statistic that tells how a document came back."""

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1000
_ALL_DECODED = 100  # the first documents of a task; of the others, every _STRIDE-th is decoded
_STRIDE = 100
_CONTEXT = 15  # characters shown on either side of a change


class HeldOutFilter(BaseFilter):
    """Takes the held-out documents out of the stream and writes them into a folder.

    Without held-out `files` the hash of a document's text decides, so that equal documents are on
    the same side.
    """

    name = "🚪 Held out"

    def __init__(self, files: Iterable[str], fraction: float, folder: Path) -> None:
        super().__init__(JsonlWriter(str(folder), "${rank}.jsonl.gz"))
        self.files = frozenset(files)
        self.fraction = fraction

    def filter(self, doc: Document) -> bool:
        """Return whether to train on the document."""
        if self.files:
            return doc.metadata["file_path"] not in self.files
        return keyed_uniform("held_out", doc.text) >= self.fraction


class HeldOutReader(JsonlReader):
    """Reads the documents that the `HeldOutFilter` of the same task number wrote, if any."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Yield this task's held-out documents."""
        path = f"{rank:05d}.jsonl.gz"
        if self.data_folder.exists(path):
            yield from self.read_file(path)


class ShortTextSignature(MinhashDedupSignature):
    """Signs a text of fewer words than `n_grams` by its hash; datatrove would keep all copies."""

    def get_shingles(self, text: str) -> np.ndarray:
        """Return the hashes of a text's n-grams, or of the whole text if it has none."""
        shingles = super().get_shingles(text)
        if shingles.size:
            return shingles
        hashed: Any = self._hash_func
        simple = simplify_text(text, self.config.norm_config)
        return np.array([[hashed(simple)]], dtype=np.uint64)


class SourceTokenizer(DocumentTokenizer):
    """Turns documents into token files, conversations with a loss mask over the answers.

    datatrove's own tokenizer encodes a special token that is spelt out in a text as that token,
    cuts off all text after a mask's last target, keeps the encodings of 10,000 documents in memory,
    and knows nothing of the text behind a token.

    It counts UTF-8 bytes: `text_bytes`. Of a sample of documents, `decoded`, it counts the ones
    that their tokens do not give back, `changed`; the first one has a statistic of its own, whose
    name tells the change.

    Args:
        bos_token: Token in front of every document but conversations; None for none.
        template: Template of conversations; None for texts.
        keep_bytes: Whether to write the bytes of text behind each token.
    """

    def __init__(
        self,
        *args: Any,
        bos_token: str | None,
        template: ChatTemplate | None,
        keep_bytes: bool,
        **options: Any,
    ) -> None:
        super().__init__(*args, save_loss_metadata=template is not None, **options)
        self.bos_token = bos_token
        self.template = template
        self.keep_bytes = keep_bytes

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
        """Tokenise documents into a file, and their masks and bytes beside it."""
        file = TokenFile(
            self.output_folder,
            filename,
            save_loss_metadata=self.save_loss_metadata,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
            save_final_metadata=self.save_final_metadata,
            token_size=self.token_size,
            keep_bytes=self.keep_bytes,
        )
        told = False
        for number, (document, pieces) in enumerate(self._encoded(data), start=1):
            parts = [np.asarray(piece.ids, dtype=f"<u{self.token_size}") for piece in pieces]
            ids = np.concatenate(parts)
            self.stat_update("tokens", value=len(ids))
            self.stat_update("text_bytes", value=len(document.text.encode()))
            if number <= _ALL_DECODED or number % _STRIDE == 0:
                self.stat_update("decoded")
                if change := self._first_change(pieces):
                    self.stat_update("changed")
                    if not told:
                        self.stat_update(f"{CHANGED}{document.id}: {change}")
                    told = True
            file.write_bytes(ids.tobytes())
            if self.template is not None:
                targets = [np.full(len(piece.ids), piece.is_target) for piece in pieces]
                file.write_loss_bytes(np.concatenate(targets).tobytes())
            if self.keep_bytes:
                file.write_token_bytes(self._token_bytes(pieces))
        file.close()
        return file

    def _encoded(self, documents: Iterable[Document]) -> Iterator[tuple[Document, Sequence[Piece]]]:
        """Yield documents with their pieces, of which the last is EOS."""
        assert self.eos_token is not None
        end = Piece("", [require_token(self.tokenizer, self.eos_token, "eos_token")])
        if self.template is not None:
            encoder = ChatEncoder(self.tokenizer, self.template)
            for batch in _batches(documents):
                chats = [conversation_of(document.metadata) for document in batch]
                yield from zip(batch, encoder.pieces(chats, self.eos_token), strict=True)
            return
        begin = Piece("", [])
        if self.bos_token is not None:
            begin = Piece("", [require_token(self.tokenizer, self.bos_token, "bos_token")])
        for batch in _batches(documents):
            encoded = self.encoder.ids([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                yield document, (begin, Piece(document.text, ids), end)

    def _first_change(self, pieces: Sequence[Piece]) -> str:
        """Return how a document comes back from its tokens; empty if unchanged.

        What precedes a piece decides whether SentencePiece's decoder gives the space before it.
        """
        texts = [piece for piece in pieces if piece.text]
        for text, ids, _ in texts:
            decoded = self.tokenizer.decode([*map(int, ids)], skip_special_tokens=False)
            if decoded == text or (len(texts) > 1 and decoded.lstrip(" ") == text.lstrip(" ")):
                continue
            pairs = zip(text, decoded, strict=False)
            same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
            same = min(len(text), len(decoded)) if same is None else same
            start = max(0, same - _CONTEXT)
            return f"{text[start : same + _CONTEXT]!r} comes back as " + repr(
                decoded[start : same + _CONTEXT]
            )
        return ""

    def _token_bytes(self, pieces: Sequence[Piece]) -> np.ndarray:
        found = [self.encoder.bytes_of(piece.text, piece.ids) for piece in pieces]
        n_bytes = np.concatenate(found)
        text_bytes = sum(len(piece.text.encode()) for piece in pieces)
        n_bytes[-1] += text_bytes - int(n_bytes.sum())  # of a text without a token, on its EOS
        return n_bytes


class TokenFile(TokenizedFile):
    """A token file with a file of `TOKEN_BYTES` beside it, if asked."""

    def __init__(self, *args: Any, keep_bytes: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bytes: Any = None
        if keep_bytes:
            self._bytes = self.output_folder.open(self.filename + BYTES_SUFFIX, mode="wb")

    def write_token_bytes(self, n_bytes: np.ndarray) -> None:
        """Append the bytes of text behind each token of a document."""
        self._bytes.write(n_bytes.astype(TOKEN_BYTES).tobytes())

    def close(self) -> None:
        """Close the files and save the index."""
        super().close()
        if self._bytes is not None:
            self._bytes.close()

    def copy(self, save_filename: str, ordering: np.ndarray, *args: Any, **options: Any) -> Any:
        """Write the documents in another order, with their bytes."""
        shuffled = super().copy(save_filename, ordering, *args, **options)
        if self._bytes is not None:
            starts, size = [0, *self.doc_ends], np.dtype(TOKEN_BYTES).itemsize
            with (
                self.output_folder.open(self.filename + BYTES_SUFFIX, mode="rb") as file,
                shuffled.output_folder.open(shuffled.filename + BYTES_SUFFIX, mode="wb") as target,
            ):
                for number in ordering:
                    file.seek(starts[number] * size)
                    target.write(file.read((starts[number + 1] - starts[number]) * size))
        return shuffled

    def cleanup(self) -> None:
        """Remove the files."""
        super().cleanup()
        if self._bytes is not None:
            self.output_folder.rm_file(self.filename + BYTES_SUFFIX)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
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
