"""The steps that we hand to datatrove: readers that count, a split by hash, and two tokenizers.

datatrove's own readers drop records without text without a count and abandon a file at its
first invalid byte; its tokenizer encodes a special token that is spelt out in a text as that token.
"""

import codecs
import io
import sys
import zlib
from collections.abc import Generator, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader
from datatrove.pipeline.readers.huggingface import HuggingFaceDatasetReader
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.readers.parquet import ParquetReader
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.batching import batched
from tokenizers import Tokenizer

from titan_loop.data.keyed import keyed_uniform
from titan_loop.data.prepare.chat_records import ChatRecords
from titan_loop.data.prepare.documents import Documents
from titan_loop.errors import UserError
from titan_loop.storage.json_files import append_jsonl, read_jsonl
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.conversation import RejectedError
from titan_loop.text.tokenizer import TURN_START, keep_whole

# Without this module fsspec opens .zst files with one that reads only the first frame, and takes a
# cut-off file for a whole one.
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SHOWN_EXAMPLES = 3
_LONGEST_LINE = 1 << 28  # a sparse file would be one endless line
DROPPED_BY_READERS = ("malformed", "missing_text", "empty", "rejected")
"""Lines that are not records, records without the field, without text, and with a bad answer."""
SPELT_CHATML = "spelt_chatml"
"""Statistic of documents whose text spells the token that begins a turn."""

Records = Generator[tuple[int, dict[str, Any] | str], None, None]
"""The number of every record of a file, and its fields, or its fault if it is malformed."""


class CountingReader(BaseReader):
    """Base of all readers: a record becomes a document or is counted as dropped.

    Its statistics are `records` and the reasons in `DROPPED_BY_READERS`. With `chat`, records are
    conversations. The folder `examples`, if there is one, takes the first few
    dropped records of each task.
    """

    def __init__(
        self, *args: Any, chat: ChatRecords | None, examples: str | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.chat = chat
        self.examples = examples
        self.shown = 0
        self.rank = 0

    def run(
        self, data: Any = None, rank: int = 0, world_size: int = 1
    ) -> Generator[Document, None, None]:
        """Read this task's documents."""
        self.rank = rank
        if self.examples is not None:
            self._examples_file().unlink(missing_ok=True)  # left by an interrupted attempt
        yield from super().run(data, rank, world_size)  # pyright: ignore[reportAbstractUsage]

    def read_records(self, filepath: str) -> Records:
        """Yield the records of one file."""
        raise NotImplementedError

    def read_file(self, filepath: str) -> Generator[Document, None, None]:
        """Yield the documents of one file."""
        for number, record in self.read_records(filepath):
            if isinstance(record, str):
                self.stat_update("records")
                self.drop("malformed", filepath, number, record)
            elif document := self.get_document_from_dict(record, filepath, number):
                yield document

    def get_document_from_dict(
        self, data: Mapping[str, Any], source_file: str, id_in_file: int | str
    ) -> Document | None:
        """Return the record's document; if there is none, count the reason."""
        self.stat_update("records")
        metadata: dict[str, Any] = {"file_path": source_file}
        try:
            if self.chat is not None:
                text, conversation = self.chat.read(data)
                metadata |= conversation
            else:
                text = data.get(self.text_key)
                if text is None:
                    raise KeyError(f"no field {self.text_key!r}")
                if not isinstance(text, str):
                    raise TypeError(f"{self.text_key!r} is not a string")
                if not text.strip():
                    raise ValueError("no text")
                if TURN_START in text:
                    self.stat_update(SPELT_CHATML)
        except KeyError as error:
            return self.drop("missing_text", source_file, id_in_file, str(error.args[0]))
        except TypeError as error:
            return self.drop("malformed", source_file, id_in_file, str(error))
        except RejectedError as error:
            return self.drop("rejected", source_file, id_in_file, str(error))
        except ValueError as error:
            return self.drop("empty", source_file, id_in_file, str(error))
        return Document(text=text, id=f"{source_file}/{id_in_file}", metadata=metadata)

    def drop(self, kind: str, source_file: str, id_in_file: int | str, reason: str) -> None:
        """Count a dropped record; keep the task's first few as examples."""
        self.stat_update(kind)
        if self.examples is not None and self.shown < SHOWN_EXAMPLES:
            self.shown += 1
            record = {"file": source_file, "record": id_in_file, "reason": reason}
            append_jsonl(self._examples_file(), record)

    def _examples_file(self) -> Path:
        assert self.examples is not None
        return Path(self.examples) / f"{self.rank:05d}.jsonl"


def dropped_examples(folder: Path) -> list[str]:
    """Return the first few dropped records that readers noted in a folder."""
    files = sorted(folder.glob("*.jsonl"))
    records = [record for path in files for record in read_jsonl(path, {"reason": str})]
    return [
        f"/{record['file']}, record {record['record']}: {record['reason']}"
        for record in records[:SHOWN_EXAMPLES]
    ]


class CountingJsonlReader(CountingReader, JsonlReader):
    """Reads JSONL line by line, plain or compressed; a bad line costs that line only."""

    def read_records(self, filepath: str) -> Records:
        """Yield the records of one file; lines are numbered from 1."""
        with _open(self, filepath, compression=self.compression) as file:
            for number, line in enumerate(_whole(file, filepath), start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    yield number, str(error)
                    continue
                yield number, record if isinstance(record, dict) else "not a JSON object"


class CountingParquetReader(CountingReader, ParquetReader):
    """Reads the columns it needs of Parquet files."""

    def read_records(self, filepath: str) -> Records:
        """Yield the records of one file; rows are numbered from 1."""
        import pyarrow
        import pyarrow.parquet

        needed = (self.text_key,) if self.chat is None else self.chat.fields
        try:
            with (
                self.data_folder.open(filepath, "rb") as file,
                pyarrow.parquet.ParquetFile(file) as table,
            ):
                columns = [name for name in needed if name in table.schema_arrow.names]
                rows = (
                    row
                    for batch in table.iter_batches(self.batch_size, columns=columns)
                    for row in batch_rows(batch)
                )
                # Without any of the columns every row is still counted.
                missing = ({} for _ in range(table.metadata.num_rows))
                for number, row in enumerate(rows if columns else missing, start=1):
                    yield number, "invalid UTF-8" if row is None else row
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(filepath, error) from error


class TextFileReader(CountingReader, BaseDiskReader):
    """Reads every file as one document."""

    name = "📄 Text file"

    def read_records(self, filepath: str) -> Records:
        """Yield the file as one record."""
        with _open(self, filepath) as file:
            content = b"".join(_whole(file, filepath))
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            yield 1, f"invalid UTF-8 ({error.reason})"
        else:
            yield 1, {self.text_key: text}


class CountingHuggingFaceReader(CountingReader, HuggingFaceDatasetReader):
    """Reads rows through the `datasets` library."""


def document_reader(
    documents: Documents,
    *,
    paths_file: Path,
    text_key: str,
    chat: ChatRecords | None,
    examples: Path | None,
) -> CountingReader:
    """Return the reader for `documents`."""
    options: dict[str, Any] = {
        "text_key": text_key,
        "chat": chat,
        "examples": None if examples is None else str(examples),
    }
    if documents.format == "huggingface":
        return CountingHuggingFaceReader(
            documents.dataset,
            {"name": documents.dataset_config, "split": documents.dataset_split},
            streaming=True,
            **options,
        )
    paths_file.parent.mkdir(parents=True, exist_ok=True)
    paths_file.write_text("".join(f"{path.lstrip('/')}\n" for path in documents.all_files()))
    readers: dict[str, type[CountingReader]] = {
        "jsonl": CountingJsonlReader,
        "parquet": CountingParquetReader,
        "text": TextFileReader,
    }
    return readers[documents.format]("/", paths_file=str(paths_file), **options)


class HeldOutFilter(BaseFilter):
    """Takes the held-out documents out of the stream and writes them into a folder.

    Without held-out `files` the hash of a document's text decides, so that equal documents are on
    the same side.
    """

    name = "🚪 Held out"

    def __init__(self, files: Iterable[str], fraction: float, folder: Path) -> None:
        super().__init__(JsonlWriter(str(folder), "${rank}.jsonl.gz"))
        self.files = frozenset(path.lstrip("/") for path in files)
        self.fraction = fraction

    def filter(self, doc: Document) -> bool:
        """Return whether to train on the document."""
        if self.files:
            return doc.metadata["file_path"] not in self.files
        return keyed_uniform("held_out", doc.text) >= self.fraction


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


class PlainTextTokenizer(DocumentTokenizer):
    """Encodes a special token spelt out in a document as text; counts UTF-8 bytes: `text_bytes`."""

    @cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return datatrove's tokenizer, which appends EOS, set to encode the rest as plain text."""
        # `func` is the function behind datatrove's cached property.
        tokenizer = DocumentTokenizer.tokenizer.func(self)
        keep_whole(tokenizer)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def write_unshuffled(self, data: Any, filename: str) -> TokenizedFile:
        """Tokenise documents into a file, counting their bytes."""
        return super().write_unshuffled(self._counted(data), filename)

    def _counted(self, data: Any) -> Generator[Document, None, None]:
        for document in data:
            self.stat_update("text_bytes", value=len(document.text.encode()))
            yield document


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
        file = TokenizedFile(
            self.output_folder,
            filename,
            save_loss_metadata=True,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
            save_final_metadata=self.save_final_metadata,
            token_size=self.token_size,
        )
        encoder = ChatEncoder(self.tokenizer, self.template)
        for batch in batched(self._counted(data), self.batch_size):
            chats = [ChatRecords.conversation(document.metadata) for document in batch]
            for ids, is_target in encoder.encode(chats, self.eos_token):
                file.write(cast(list[int], ids), is_target)
                self.stat_update("tokens", value=len(ids))
        file.close()
        return file


def batch_rows(batch: Any) -> Generator[dict[str, Any] | None, None, None]:
    """Yield the rows of an Arrow batch, None for one that holds invalid UTF-8."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError:
            yield None


def _open(reader: BaseDiskReader, path: str, **options: Any) -> Any:
    try:
        return reader.data_folder.open(path, "rb", **options)
    except OSError as error:
        raise _unreadable(path, error) from error


def _whole(file: Any, path: str) -> Generator[bytes, None, None]:
    lines = file if hasattr(file, "readline") else io.BufferedReader(file)
    try:
        while line := lines.readline(_LONGEST_LINE + 1):
            if len(line) > _LONGEST_LINE:
                raise UserError(
                    f"input /{path} has a line of more than {_LONGEST_LINE:,} bytes: split or "
                    "remove it"
                )
            yield line
    except (EOFError, OSError, zlib.error, zstd.ZstdError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return UserError(f"input /{path} cannot be read to its end ({reason}): replace it")
