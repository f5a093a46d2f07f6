"""The training loader over a pipeline of one's own: its documents, packed into windows.

Each data-parallel rank has a pipeline, which its tensor- and context-parallel ranks read, too.
Unlike other loaders, this one cannot find window k without reading all before it: a checkpoint
holds the state of every rank's pipeline, and resumes with as many ranks alone.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_loop.data.load.batches import BatchesRead, DataVocabulary, GlobalBatchLoader, Position
from titan_loop.data.load.changes import SOURCES
from titan_loop.data.load.windows import Window
from titan_loop.data.pipeline import FIELD, Pipeline, pack_state, read_state
from titan_loop.data.source_card import SHORT_DIGEST, file_sha256
from titan_loop.errors import UserError
from titan_loop.text.encoding import DocumentEncoder
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    require_token,
    template_bos,
    vocab_size,
)

logger = logging.getLogger(__name__)

RANKS = "pipeline_ranks"


@dataclass(kw_only=True, slots=True)
class PipelineOptions(GlobalBatchLoader.Config):
    """Options of a pipeline of one's own."""

    pipeline: str = ""
    """A torchdata pipeline of your own instead of the mixture: PACKAGE.MODULE:FUNCTION, called with
    a data-parallel rank and their number. Resumes with the same number of ranks alone."""

    tokenizer_path: str = ""
    """The tokenizer.json of the pipeline's text or ids; prepared sources have theirs."""

    eos_token: str = END_OF_TEXT
    """Token that ends every document of the pipeline."""

    def tokenizer_file(self) -> str:
        """Return `tokenizer_path`; `UserError` without one."""
        if not self.tokenizer_path:
            fix = "dataloader.tokenizer_path, the tokenizer.json that its text or ids belong to"
            raise UserError(f"{FIELD}={self.pipeline} needs {fix}")
        return self.tokenizer_path

    def vocabulary(self) -> DataVocabulary:
        """Return the vocabulary of the tokenizer, whose ids the pipeline's are."""
        size = vocab_size(load_tokenizer(self.tokenizer_file()))
        return DataVocabulary(size, size - 1)


class PipelineLoader(GlobalBatchLoader):
    """Packs the documents of `dataloader.pipeline` into windows of L + 1 tokens."""

    may_end = True

    def __init__(
        self,
        config: PipelineOptions,
        *,
        seq_len: int,
        dp_world_size: int,
        dp_rank: int,
        **split: Any,
    ) -> None:
        self._encoder = DocumentEncoder(config.tokenizer_file())
        tokenizer = self._encoder.tokenizer
        self._eos = require_token(tokenizer, config.eos_token, "dataloader.eos_token")
        bos = template_bos(tokenizer, config.tokenizer_path, "correct its post_processor")
        self._begin = [] if bos is None else [bos]
        self._ids = vocab_size(tokenizer)
        self._pipeline = Pipeline(config.pipeline, dp_rank, dp_world_size)
        self._items = iter(self._pipeline)
        # What was read and not yet used: tokens, where their documents end, and finished windows.
        self._left = np.empty(0, dtype=np.int64)
        self._ends: list[int] = []
        self._windows: list[tuple[np.ndarray, ...]] = []
        self._read_hash = ""
        self._skipped = 0
        self._resumes = False
        description = {
            "pipeline": config.pipeline,
            "tokenizer": file_sha256(Path(config.tokenizer_path))[:SHORT_DIGEST],
            "eos_id": self._eos,
            "seq_len": seq_len,
            SOURCES: [],
        }
        super().__init__(
            config,
            description,
            seq_len=seq_len,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            **split,
        )
        # A batch read ahead could not be given back. Pipelines have workers and prefetchers.
        self._prefetch = False

    def read(self, position: Position) -> BatchesRead:
        """As in the base class, after the windows that are jumped over."""
        numbers = self.next_windows(position.first_window, position.windows)
        jumped = int(numbers[-1]) + 1 - position.first_window - position.windows
        for _ in range(jumped // self._dp_world_size):
            self._next_window()
        return super().read(position)

    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Write this rank's next window, whatever its number."""
        inputs, labels, positions = self._next_window()
        window.input[:], window.labels[:], window.positions[:] = inputs, labels, positions

    def log_progress(self, step: int) -> None:
        """Log the number of items that this rank's pipeline has yielded."""
        empty = f", {self._skipped} of them without text" if self._skipped else ""
        logger.info("items of the pipeline read by step %d: %d%s", step, self._pipeline.read, empty)

    def close(self) -> None:
        """Let go of the pipeline (see the base class)."""
        super().close()
        self._pipeline.close()

    def why_it_ends(self, global_batch_windows: int) -> str | None:
        """As in the base class: read this rank's windows, which the next `read_step` takes."""
        first = self.windows_consumed
        last = int(self.next_windows(first, global_batch_windows)[-1])
        try:
            self._queue((last + 1 - first) // self._dp_world_size)
        except UserError as error:
            return str(error)
        return None

    def _next_window(self) -> tuple[np.ndarray, ...]:
        self._queue(1)
        window = self._windows.pop(0)
        content = b"".join([self._read_hash.encode(), *(each.tobytes() for each in window)])
        self._read_hash = hashlib.blake2b(content, digest_size=16).hexdigest()
        return window

    def _queue(self, windows: int) -> None:
        """Read until so many windows are finished."""
        if not self._pipeline.read:
            self._pipeline.note_state()
        while len(self._windows) < windows:
            if len(self._left) > self._seq_len:
                self._windows.append(self._cut())
            elif (item := next(self._items, None)) is None:
                raise self._pipeline.ended()
            else:
                self._take_all(item)

    def _take_all(self, item: Sequence[Any]) -> None:
        """Take all of an item, since the pipeline's state is after it; nothing if any is faulty."""
        before = self._left, [*self._ends], [*self._windows], self._skipped
        try:
            for document in item:
                self._take(document)
        except UserError:
            self._left, self._ends, self._windows, self._skipped = before
            raise

    def _take(self, document: Any) -> None:
        if isinstance(document, Mapping):
            if len(self._left):
                raise self._pipeline.bad("a finished window among documents: yield one of the two")
            self._windows.append(self._pipeline.window(document, self._ids, self._seq_len))
            return
        if not (document.strip() if isinstance(document, str) else len(document)):
            self._skipped += 1
            return
        if isinstance(document, str):
            (ids,) = self._encoder.ids([document])
            ids = np.concatenate([self._begin, ids, [self._eos]]).astype(np.int64)
        else:
            ids = self._pipeline.ids(document, self._ids, self._eos)
        self._left = np.concatenate([self._left, ids])
        self._ends.append(len(self._left))

    def _cut(self) -> tuple[np.ndarray, ...]:
        size = self._seq_len + 1
        inputs, positions, labels = np.empty((3, self._seq_len), dtype=np.int64)
        ends = np.array([end for end in self._ends if end <= size], dtype=np.int64)
        Window(inputs, positions, labels).fill(self._left[:size], ends)
        # Neighbours share a token, so that each one is predicted once.
        self._left = self._left[self._seq_len :]
        self._ends = [end - self._seq_len for end in self._ends if end > self._seq_len]
        return inputs, labels, positions

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """As in the base class; the pipelines' own states are in `rank_files`."""
        return {**super().state_dict(), RANKS: self._dp_world_size, "read": {"windows": []}}

    def rank_files(self) -> dict[str, bytes]:
        """Return the state of this rank's pipeline (see the base class)."""
        state = {
            **self._pipeline.state_dict(),
            "skipped": self._skipped,
            "left": self._left,
            "ends": self._ends,
            "windows": self._windows,
            "read_hash": self._read_hash,
        }
        return {self._file: pack_state(state)}

    def load_rank_files(self, folder: Path) -> None:
        """Continue this rank's pipeline (see the base class)."""
        if not self._resumes:
            return
        state = read_state(folder / self._file)
        self._pipeline.load_state_dict(state)
        self._left, self._ends, self._skipped = state["left"], state["ends"], state["skipped"]
        self._windows = state["windows"]
        self._read_hash = state["read_hash"]

    @property
    def _file(self) -> str:
        return f"pipeline_{self._dp_rank:05d}.safetensors"

    def _restore(self, state_dict: dict[str, Any]) -> None:
        if (saved := state_dict[RANKS]) != self._dp_world_size:
            name = self._description["pipeline"]
            raise UserError(
                f"{FIELD}={name} was saved on {saved} data-parallel ranks and cannot go on with "
                f"{self._dp_world_size}: start {saved} ranks, or store its texts as a source, "
                f"which any number can read, with titan-loop data tokenize --pipeline {name} "
                "--output FOLDER --tokenizer FILE if it ends; one that begins again needs a "
                "function of one pass"
            )
        self._resumes = True
