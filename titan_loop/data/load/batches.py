"""The base of every loader: global batches of numbered windows, and a position with their hash.

Which window has number k is a pure function, so a global batch holds the same windows for every
split into ranks, local batches and accumulation steps. The state is the number of windows consumed,
a hash of them, and a readable description of the data. A checkpoint with another description is
refused, or accepted with a record of the differences.
"""

import titan_loop.compat as compat  # before any torchtitan module

# isort: split

import hashlib
import json
import logging
import struct
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from titan_loop.data.columns import LABELLED, Column
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.changes import data_changes
from titan_loop.data.load.jumps import joined, next_windows
from titan_loop.data.load.windows import Batch, Window, empty_batch
from titan_loop.data.prefix import PREFIX_COLUMN, prefix_of
from titan_loop.data.tasks.task import Task
from titan_loop.errors import Refusal, UserError
from titan_loop.models.context import PREFIX
from titan_loop.ranks import warn_together

logger = logging.getLogger(__name__)

_WINDOW_ID = struct.Struct("<QQQ")


class DataVocabulary(NamedTuple):
    """Sizes that a model takes from its data.

    `largest_token` is the largest id that occurs, which may exceed the tokenizer's `size`;
    `options` are further model options that follow from the data, with their least values.
    """

    size: int
    largest_token: int
    options: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class SourceProgress(NamedTuple):
    """Windows, tokens (padding included) and epochs that all ranks have read of one source."""

    name: str
    windows: int
    tokens: int
    epochs: float


class Position(NamedTuple):
    """A global batch to be read, and the hash of everything before it."""

    first_window: int
    windows: int
    data_hash: str


class BatchesRead(NamedTuple):
    """This rank's part of a global batch, and the hash after it."""

    batches: list[Batch]
    data_hash: str


def pinned(values: Tensor) -> Tensor:
    """Return values in pinned memory if there is a GPU; copies from other memory block the host."""
    return values.pin_memory() if compat.device_type() == "cuda" else values


class GlobalBatchLoader(BaseDataLoader):
    """Base of all loaders. A subclass locates and fills windows; the rest is done here.

    With dp ranks and local batch b, window k of the global batch that starts at window s goes to

        micro-batch m = (k - s) // (dp b),   rank r = (k - s) % (dp b) // b,   row (k - s) % b

    While a step trains, a thread reads the next global batch; it counts as consumed only when the
    training loop takes it. `description` lists everything the data and its order depend on, as
    readable JSON fields; a saved position is only valid where it is the same, paths aside.

    Attributes:
        windows_consumed: Windows read or jumped over by all ranks together since the job's start.
        jumped: Ranges (first, stop) of windows that are jumped over.
        data_hash: 32 hexadecimal digits over the description and the windows' identities, in order:
            equal on all ranks, and independent of the grouping of windows into batches.
        accepted: A record for every change of the data that was accepted when resuming.
        level: Level of the next window in a curriculum; 0 without one.
        rate_start_tokens: Tokens at which the learning rate's schedule began.
        may_end: Whether the data may end or fail on one rank at a step that no rank knows before;
            the ranks then agree before every step whether all have data for it.
    """

    may_end: bool = False
    level: int = 0
    rate_start_tokens: int = 0

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Options of every loader, and facts about its data that are known before it is built."""

        prefetch: bool = True
        """Read the next global batch in a thread while this one trains."""

        accept_change: bool = False
        """Continue a checkpoint in other data; the changes are logged and recorded."""

        prefix: bool = False
        """Mark the tokens of every document before its first answer, for models that read prompts
        in both directions; text without a loss mask has none."""

        def vocabulary(self) -> DataVocabulary:
            """Return the vocabulary of the data."""
            raise NotImplementedError

        def source_weights(self) -> dict[str, float]:
            """Return weight by path of the prepared sources; none for tasks."""
            return {}

        def source_paths(self) -> list[str]:
            """Return the prepared sources, which may have held-out text; none for tasks."""
            return [*self.source_weights()]

        def generated_task(self) -> Task | None:
            """Return the task whose examples are read; None for text."""
            return None

        def columns(self) -> tuple[Column, ...]:
            """Return the columns that batches have besides tokens, positions and labels."""
            task = self.generated_task()
            columns = () if task is None else task.columns
            return (*columns, PREFIX_COLUMN) if self.prefix else columns

        def refusals(self, loss: Any, *, local_batch_size: int) -> Iterator[Refusal]:
            """Refuse an objective's config, or a batch, that does not go with the data."""
            yield from ()

        def callbacks(self) -> list[Any]:
            """Return callbacks that the data brings to the training."""
            return []

        def knows_depth(self) -> bool:
            """Return whether the loader knows the recurrent steps that its windows need."""
            task = self.generated_task()
            return task is not None and task.knows_depth

        def few_labels(self) -> bool:
            """Return whether the readout should skip tokens without a label, as most have none."""
            return False

    def __init__(
        self,
        config: "GlobalBatchLoader.Config",
        description: Mapping[str, Any],
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        seq_len: int,
        **unused: Any,
    ) -> None:
        if config.dataset or config.dataset_path:  # torchtitan's own
            raise UserError(
                "dataloader.dataset and dataloader.dataset_path have no effect: leave them out"
            )
        self._prefetch = config.prefetch
        self._accept_change = config.accept_change
        self._few_labels = config.few_labels()
        self.columns = config.columns()
        shown = dict(description)
        if self.columns:
            shown["columns"] = [column.description() for column in self.columns]
        self._description = json.loads(json.dumps(shown))  # as a checkpoint has it: without tuples
        self._dp_world_size = dp_world_size
        self._dp_rank = dp_rank
        self._local_batch_size = local_batch_size
        self._seq_len = seq_len
        self.windows_consumed = 0
        self.jumped: list[tuple[int, int]] = []
        hashed = json.dumps(self._hashed_description(), sort_keys=True)
        self._initial_hash = hashlib.blake2b(hashed.encode(), digest_size=16).hexdigest()
        self.data_hash = self._initial_hash
        self.accepted: list[dict[str, Any]] = []
        # Not torchdata.nodes: its Prefetcher puts a traceback into the message of an error, and
        # its shutdown returns after half a second, while its thread still reads our files.
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[Position, Future[BatchesRead]] | None = None

    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return the identity of each global window: uint64, shape (len(window), 3)."""
        identity = np.zeros((len(window), 3), dtype=np.uint64)
        identity[:, 2] = window
        return identity

    @abstractmethod
    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Build the window with this identity (a row of `locate`'s result)."""

    def depth(self, identity: np.ndarray) -> int:
        """Return the recurrent steps that a window needs; only for loaders that know it."""
        raise NotImplementedError

    def deepest(self, windows: int) -> int:
        """Return the largest depth of the next windows, over all ranks, without consuming them."""
        identity = self.locate(self.next_windows(self.windows_consumed, windows))
        return max(self.depth(row) for row in identity)

    def progress(self) -> list[SourceProgress]:
        """Return the progress of each source; none for generated tasks."""
        return []

    def log_progress(self, step: int) -> None:
        """Log every source's progress by the end of a training step."""
        read = [f"{each.name} {each.tokens} ({each.epochs:.3f} epochs)" for each in self.progress()]
        if read:
            logger.info("tokens read by step %d: %s", step, ", ".join(read))

    def log_sources(self, windows: int) -> None:
        """Log the sources that a job of this many windows reads; called once, at the start."""

    def require_windows(self, windows: int) -> None:
        """Raise `UserError` with the settings to change if the data ends before these windows."""

    def next_windows(self, first: int, count: int) -> np.ndarray:
        """Return the numbers of the next `count` windows from `first` that are not jumped over."""
        return next_windows(first, count, self.jumped)

    def why_it_ends(self, global_batch_windows: int) -> str | None:
        """Return why this rank cannot read the next global batch; None if it can."""
        return None

    def read_step(self, global_batch_windows: int) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch and move on by that batch.

        A `UserError`, as for data that ends or a damaged file, consumes nothing.
        """
        per_micro_batch = self._dp_world_size * self._local_batch_size
        if global_batch_windows <= 0 or global_batch_windows % per_micro_batch:
            raise UserError(
                f"global batch of {global_batch_windows} windows is not a positive multiple of "
                f"data-parallel degree x training.local_batch_size = {self._dp_world_size} x "
                f"{self._local_batch_size}: change one of the three"
            )
        position = Position(self.windows_consumed, global_batch_windows, self.data_hash)
        ahead = self._take_ahead()
        read = ahead[1].result() if ahead and ahead[0] == position else self.read(position)
        numbers = self.next_windows(self.windows_consumed, global_batch_windows)
        self.windows_consumed = int(numbers[-1]) + 1
        self.data_hash = read.data_hash
        if self._prefetch:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
            following = Position(self.windows_consumed, global_batch_windows, self.data_hash)
            self._ahead = following, self._thread.submit(self.read, following)
        return read.batches

    def read(self, position: Position) -> BatchesRead:
        """Read this rank's part of a global batch without consuming it."""
        first, count, data_hash = position
        identity = self.locate(self.next_windows(first, count))
        by_rank = identity.reshape(-1, self._dp_world_size, self._local_batch_size, 3)
        batches: list[Batch] = []
        for identities in by_rank[:, self._dp_rank]:
            batch, windows = empty_batch(self._local_batch_size, self._seq_len, self.columns)
            for row, window in zip(identities, windows, strict=True):
                self.fill_window(row, window)
            inputs, labels = batch
            if PREFIX_COLUMN in self.columns:
                inputs[PREFIX] = prefix_of(inputs["positions"], labels)
            if self._few_labels:
                inputs[LABELLED] = (labels.flatten() != IGNORED).nonzero().flatten()
            batches.append(({name: pinned(each) for name, each in inputs.items()}, pinned(labels)))
        return BatchesRead(batches, self.hash_after(data_hash, identity))

    @staticmethod
    def hash_after(data_hash: str, identity: np.ndarray) -> str:
        """Return the data hash after windows with these identities."""
        digest = bytes.fromhex(data_hash)
        for row in identity.tolist():
            digest = hashlib.blake2b(digest + _WINDOW_ID.pack(*row), digest_size=16).digest()
        return digest.hex()

    def _take_ahead(self) -> tuple[Position, "Future[BatchesRead]"] | None:
        """Wait for the thread, which shares our open files, and return the batch that it read."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].exception()
        return ahead

    def close(self) -> None:
        """End the reading thread; a batch that was read ahead was never consumed."""
        self._take_ahead()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def jump(self, windows: Iterable[tuple[int, int]]) -> None:
        """Leave out ranges (first, stop) of windows from now on; equal on all ranks."""
        self._take_ahead()
        self.jumped = joined([*self.jumped, *windows])

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches one at a time, without end."""
        while True:
            yield from self.read_step(self._dp_world_size * self._local_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: a little JSON, the same on every rank."""
        jumped = {"jumped": [list(pair) for pair in self.jumped]} if self.jumped else {}
        return {
            "windows_consumed": self.windows_consumed,
            "data_hash": self.data_hash,
            "data": self._description,
            "accepted": self.accepted,
            **jumped,
        }

    def rank_files(self) -> dict[str, bytes]:
        """Return files with the state of this data-parallel rank alone, by name; mostly none."""
        return {}

    def load_rank_files(self, folder: Path) -> None:
        """Restore the state in the files of `rank_files`; call it after `load_state_dict`."""

    def check_state(self, state_dict: dict[str, Any]) -> list[str]:
        """Return the changes of the data that `dataloader.accept_change` accepts, or refuse them.

        Ranks and batch sizes may differ.
        """
        if not state_dict:
            return []
        changes = data_changes(state_dict["data"], self._description)
        if changes and not self._accept_change:
            raise UserError(
                f"the checkpoint was saved while reading other data: {'; '.join(changes)}. Undo "
                "this, start anew in another dump_folder, or continue in the new data with "
                "--dataloader.accept-change"
            )
        return changes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position in `state_dict`, saved under any split; empty means the start."""
        self._take_ahead()
        changes = self.check_state(state_dict)
        if not state_dict:
            return
        self.windows_consumed = int(state_dict["windows_consumed"])
        self.accepted = list(state_dict["accepted"])
        self.jumped = [(first, stop) for first, stop in state_dict.get("jumped", [])]
        if changes:
            warn_together(
                logger,
                f"continuing at window {self.windows_consumed} in other data, as "
                f"dataloader.accept_change allows: {'; '.join(changes)}",
            )
            record = {"window": self.windows_consumed, "changes": changes}
            self.accepted.append(record | self._continue_from(state_dict))
            both = f"{state_dict['data_hash']}{self._initial_hash}"
            self.data_hash = hashlib.blake2b(both.encode(), digest_size=16).hexdigest()
        else:
            self._restore(state_dict)
            self.data_hash = str(state_dict["data_hash"])

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Restore a subclass's own state; the data is the same."""

    def _continue_from(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Choose the position in other data than the state's; return the record of it."""
        return {}

    def _hashed_description(self) -> dict[str, Any]:
        """Return the part of the description that the order of windows depends on."""
        return self._description
