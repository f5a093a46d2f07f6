"""Documents of a pipeline of one's own: texts are tokenised, ids and finished windows kept.

    window ─► a document for each part whose positions begin at 0: its input, and the label of its
              last place; the loss mask says where a token was a label

Packed for windows of the same length, a source of windows gives them back.
"""

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens.tokenizer import TokenizedFile

from titan_loop.data.labels import IGNORED
from titan_loop.data.pipeline import MIXED, Pipeline
from titan_loop.data.prepare.document_tokenizer import CountedFile, PlainTextTokenizer
from titan_loop.data.prepare.readers import CountingReader
from titan_loop.text.tokenizer import load_tokenizer, require_token, vocab_size

logger = logging.getLogger(__name__)

GIVEN = "given_ids"
"""Key of a document's own ids in its metadata; the statistic of such documents."""
_TARGETS = "targets"


class PipelineReader(CountingReader):
    """Reads a pipeline: task r of n is its rank r of n.

    Args:
        tokenizer: The tokenizer.json of the ids.
        rewrites: Whether a filter rewrites texts, which ids would not follow.
    """

    def __init__(
        self, pipeline: str, *, tokenizer: Path, eos_token: str, rewrites: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self.pipeline = pipeline
        self.tokenizer = tokenizer
        self.eos_token = eos_token
        self.rewrites = rewrites

    def run(
        self, data: Any = None, rank: int = 0, world_size: int = 1
    ) -> Generator[Document, None, None]:
        """Read this task's documents."""
        self.begin(rank)
        pipeline = Pipeline(self.pipeline, rank, world_size, field="pipeline")
        tokenizer = load_tokenizer(self.tokenizer)
        eos_id = require_token(tokenizer, self.eos_token, "eos_token")
        vocabulary = vocab_size(tokenizer)
        length = 0  # of the first window, which all others have
        logger.info("reading %s to its end", self.pipeline)
        for number, item in enumerate(chain.from_iterable(pipeline), start=1):
            if isinstance(item, str):
                record = {self.text_key: item}
                if document := self.get_document_from_dict(record, self.pipeline, number):
                    yield document
                continue
            self.stat_update("records")
            if self.rewrites:
                raise pipeline.bad("ids, which quality.c4_quality would rewrite: drop it")
            if isinstance(item, Mapping):
                if number > 1 and not length:
                    raise pipeline.bad(MIXED)
                length = length or len(item["input"])
                window = pipeline.window(item, vocabulary, length, "as in the first window")
                parts = _documents(pipeline, *window)
            elif len(item):
                parts = [{GIVEN: pipeline.ids(item, vocabulary, eos_id).tolist()}]
            else:
                self.drop("empty", self.pipeline, number, "no ids")
                continue
            if length and not isinstance(item, Mapping):
                raise pipeline.bad(MIXED)
            for part, metadata in enumerate(parts):
                self.stat_update(GIVEN)
                metadata["file_path"] = self.pipeline
                text = tokenizer.decode(metadata[GIVEN])
                yield Document(text, id=f"{self.pipeline}/{number}/{part}", metadata=metadata)


def _documents(
    pipeline: Pipeline, inputs: np.ndarray, labels: np.ndarray, positions: np.ndarray
) -> Iterator[dict[str, Any]]:
    starts = np.flatnonzero(positions == 0)
    begins = np.repeat(starts, np.diff(starts, append=len(inputs)))
    if len(begins) != len(inputs) or (positions != np.arange(len(inputs)) - begins).any():
        problem = "positions that neither go on by one nor begin again at 0"
        raise pipeline.bad(f"{problem}, which a source cannot hold: train on the pipeline itself")
    for start, stop in pairwise([*starts.tolist(), len(inputs)]):
        ids, wanted = inputs[start:stop], labels[start:stop]
        is_target = wanted != IGNORED
        if (is_target[:-1] & (wanted[:-1] != ids[1:])).any():
            problem = "a label other than the next id, which a source cannot hold"
            raise pipeline.bad(f"{problem}: train on the pipeline itself")
        ids = np.append(ids, wanted[is_target.size - 1 :][is_target[-1:]])
        mask = np.append(False, is_target)[: len(ids)]
        yield {GIVEN: ids.tolist(), _TARGETS: mask.tolist()}


class PipelineTokenizer(PlainTextTokenizer):
    """Tokenises texts and writes given ids as they are, with a loss mask for windows."""

    def write_unshuffled(self, data: Any, filename: str) -> TokenizedFile:
        """Write documents into a file."""
        documents = iter(data)
        first = [*zip(range(1), documents, strict=False)]
        self.save_loss_metadata = any(_TARGETS in document.metadata for _, document in first)
        file = self.new_file(filename)
        whole = chain((document for _, document in first), documents)
        for given, group in groupby(whole, key=lambda document: GIVEN in document.metadata):
            (self._write_given if given else self.write_texts)(file, group)
        file.close()
        return file

    def _write_given(self, file: CountedFile, documents: Iterable[Document]) -> None:
        for document in documents:
            ids = np.array(document.metadata[GIVEN], dtype=np.int64)
            n_bytes, is_exact = self._given_bytes(document.text, ids)
            self.stat_update("tokens", value=len(ids))
            self.stat_update("text_bytes", value=int(n_bytes.sum()))
            file.write_ids(ids)
            if self.save_loss_metadata:
                mask = np.array(document.metadata[_TARGETS], dtype=np.uint8)
                file.write_loss_bytes(mask.tobytes())
            if self.keep_bytes:
                file.write_token_bytes((n_bytes, is_exact))

    def _given_bytes(self, text: str, ids: np.ndarray) -> tuple[np.ndarray, bool]:
        if self.encoder.table is not None:  # of a character that a window cuts, too
            return self.encoder.table[ids], True
        added = self.tokenizer.get_added_tokens_decoder()
        is_text = ~np.isin(ids, [number for number, token in added.items() if token.special])
        n_bytes = np.zeros(len(ids), dtype=np.int64)
        n_bytes[is_text], _ = self.text_bytes(text, ids[is_text])
        return n_bytes, False
