"""The steps that we hand to datatrove: a split into training and held-out, a tokenizer of chats."""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.batching import batched

from titan_loop.data.keyed import keyed_integer, keyed_uniform
from titan_loop.data.prepare.chat_records import ChatRecords
from titan_loop.data.prepare.document_tokenizer import PlainTextTokenizer
from titan_loop.data.shards import file_chunks
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate


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


class TextHashes(PipelineStep):
    """Writes a keyed hash of every text into a folder, held-out `files` into a list apart."""

    name = "🔑 Hashes of texts"

    def __init__(self, files: Iterable[str], folder: Path) -> None:
        super().__init__()
        self.files = frozenset(files)
        self.folder = folder

    def run(
        self, data: Any = None, rank: int = 0, world_size: int = 1
    ) -> Generator[Document, None, None]:
        """Pass on the documents of this task."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = self.folder / f"{rank:05d}"
        with (
            stem.with_suffix(".train").open("wb") as train,
            stem.with_suffix(".held_out").open("wb") as held_out,
        ):
            for document in data:
                file = held_out if document.metadata["file_path"] in self.files else train
                file.write(keyed_integer("text", document.text).to_bytes(8, "little"))
                yield document

    @staticmethod
    def count_shared(folder: Path) -> tuple[int, int]:
        """Return how many different held-out texts are trained on, too, and how many there are."""
        parts = [chunk for path in folder.glob("*.held_out") for chunk in file_chunks(path, "<u8")]
        texts = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))
        shared = np.zeros(len(texts), dtype=bool)
        for path in folder.glob("*.train"):
            for chunk in file_chunks(path, "<u8"):
                shared |= np.isin(texts, chunk)
        return int(shared.sum()), len(texts)


class HeldOutReader(JsonlReader):
    """Reads the documents that the `HeldOutFilter` of the same task number wrote, if any."""

    def run(
        self, data: Any = None, rank: int = 0, world_size: int = 1
    ) -> Generator[Document, None, None]:
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
        return np.array([[hashed(text)]], dtype=np.uint64)


class ChatTokenizer(PlainTextTokenizer):
    """Tokenises conversations with a loss mask over the assistant's turns.

    datatrove's own masks cut off all text after the last target, including the EOS.
    """

    def __init__(self, *args: Any, template: ChatTemplate, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.template = template

    def write_unshuffled(self, data: Any, filename: str) -> TokenizedFile:
        """Tokenise conversations into a file and its mask."""
        assert self.eos_token is not None
        file = self.new_file(filename)
        encoder = ChatEncoder(self.tokenizer, self.template)
        for batch in batched(data, self.batch_size):
            chats = [ChatRecords.conversation(document.metadata) for document in batch]
            encoded = encoder.encode(chats, self.eos_token)
            for document, chat, (ids, is_target) in zip(batch, chats, encoded, strict=True):
                if self.count(document):
                    texts = [(text, part) for text, part in encoder.texts(chat) if text]
                    self.compare(document, texts)
                file.write(cast(list[int], ids), is_target)
                self.stat_update("tokens", value=len(ids))
                if self.keep_bytes:
                    file.write_token_bytes(self._chat_bytes(encoder.texts(chat), len(ids)))
        file.close()
        return file

    def _chat_bytes(self, texts: list[tuple[str, Any]], count: int) -> tuple[np.ndarray, bool]:
        """Return the bytes behind the tokens of a chat, and whether they are the table's."""
        parts: list[np.ndarray] = []
        all_exact = True
        for text, ids in texts:
            found, is_exact = self.text_bytes(text, np.asarray(ids, dtype=np.int64))
            all_exact &= is_exact
            parts.append(found)
        n_bytes = np.concatenate(parts)
        return np.append(n_bytes, np.zeros(count - len(n_bytes))), all_exact
