"""How a global batch is split over ranks and micro-batches, and the proof of what was read.

A loader knows two things: how to build window k (a pure function) and how many windows the whole
job has consumed. `GlobalWindowLoader` turns these into torchtitan's data loader interface; its
subclasses say only what a window is. The *set* of windows of a global batch is the same for every
split into ranks, local batches and accumulation steps. While a step trains, a thread reads the next
global batch; it counts as consumed only when the training loop takes it.
"""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

# isort: split

import hashlib
import json
import logging
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader

from titan_loop.data.load.changes import data_changes
from titan_loop.data.load.windows import Window
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input", "positions"}, labels): int64 tensors of shape (b, L)."""

_WINDOW_ID = struct.Struct("<QQQ")


class DataVocabulary(NamedTuple):
    """What a model must be able to embed: the tokenizer's size, and the largest id that occurs."""

    size: int
    largest_token: int


class SourceProgress(NamedTuple):
    """How far all ranks together have read one source.

    Attributes:
        name: The folder's name, or its path where two share a name.
        windows: Windows consumed.
        tokens: windows x window length (packed windows: with their padding).
        epochs: windows / windows of an epoch.
    """

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


def empty_batch(count: int, seq_len: int) -> tuple[Batch, list[Window]]:
    """Return a batch to be filled, and its rows as windows over the same memory."""
    columns = [torch.empty(count, seq_len, dtype=torch.int64) for _ in range(3)]
    inputs, positions, labels = columns
    rows = zip(*(column.numpy() for column in columns), strict=True)
    return ({"input": inputs, "positions": positions}, labels), [Window(*row) for row in rows]


class GlobalWindowLoader(BaseDataLoader):
    """Base of loaders whose only state is the number of windows the whole job has consumed.

    With dp ranks and local batch b, window k of the global batch that starts at window s goes to

        micro-batch m = (k - s) // (dp b),   rank r = (k - s) % (dp b) // b,   row (k - s) % b

    Args:
        config: Its `prefetch` and `accept_change`.
        description: Everything the windows and their order depend on, in readable JSON fields;
            starts the hash, and a saved position means something only where it is the same.
        dp_world_size: dp, the number of data-parallel ranks.
        dp_rank: r, this process's data-parallel rank.
        local_batch_size: b, windows of a micro-batch on one rank.
        seq_len: L.

    Attributes:
        windows_consumed: Windows read by all ranks together since the start of the job.
        data_hash: 32 hexadecimal digits over the description and the ids of these windows, in
            order. Equal on all ranks, and independent of how windows were grouped into batches.
        accepted: One record for every change of the data that was accepted when resuming.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What every loader can say before it is built, so that mistakes surface early."""

        prefetch: bool = True
        """Read the next global batch in a thread while this one trains."""

        accept_change: bool = False
        """Continue a checkpoint although the data is another; what changed is logged and kept."""

        def vocabulary(self) -> DataVocabulary:
            """Return the vocabulary of the data."""
            raise NotImplementedError

        def source_paths(self) -> list[str]:
            """Return the prepared sources that have a held-out split; none for generated tasks."""
            raise NotImplementedError

        def task(self) -> Task | None:
            """Return the generated task whose examples are read; None for text."""
            return None

    def __init__(
        self,
        config: Config,
        description: Mapping[str, Any],
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        seq_len: int,
    ) -> None:
        self._accept_change = config.accept_change
        self._prefetch = config.prefetch
        self._description = dict(description)
        self._dp_world_size = dp_world_size
        self._dp_rank = dp_rank
        self._local_batch_size = local_batch_size
        self._seq_len = seq_len
        self.windows_consumed = 0
        hashed = json.dumps(self._hashed_description(), sort_keys=True)
        self._initial_hash = hashlib.blake2b(hashed.encode(), digest_size=16).hexdigest()
        self.data_hash = self._initial_hash
        self.accepted: list[dict[str, Any]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[Position, Future[BatchesRead]] | None = None

    @abstractmethod
    def locate(self, window: np.ndarray) -> np.ndarray:
        """Return the identity of each global window: uint64, shape (len(window), 3).

        Raises:
            UserError: If there are no such windows.
        """

    @abstractmethod
    def fill_window(self, identity: np.ndarray, window: Window) -> None:
        """Build the window with this identity (a row of what `locate` returns)."""

    def progress(self) -> list[SourceProgress]:
        """Return how far each source has been read; none for generated tasks."""
        return []

    def log_sources(self, windows: int) -> None:
        """Say what is read by a job of this many windows; once, when training starts."""

    def require_windows(self, windows: int) -> None:
        """Refuse a job of this many windows if the data ends before.

        Raises:
            UserError: With what has to change.
        """

    def read_step(self, global_batch_windows: int) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch and move on by that batch.

        Args:
            global_batch_windows: Windows of the global batch, over all ranks and micro-batches.

        Raises:
            UserError: If the global batch is not a positive multiple of dp_world_size x
                local_batch_size, the data ends, or a file can no longer be read. Then nothing was
                consumed.
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
        if ahead is not None and ahead[0] == position:
            read = ahead[1].result()
        else:
            read = self.read_position(position)
        self.windows_consumed += global_batch_windows
        self.data_hash = read.data_hash
        if self._prefetch:
            self._read_ahead(position._replace(
                first_window=self.windows_consumed, data_hash=self.data_hash
            ))  # fmt: skip
        return read.batches

    def close(self) -> None:
        """End the prefetching thread; what it has read is forgotten, and was never consumed."""
        self._take_ahead()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def read_position(self, position: Position) -> BatchesRead:
        """Read this rank's part of a global batch; a pure function of the position."""
        first, count, data_hash = position
        identity = self.locate(np.arange(first, first + count))
        by_rank = identity.reshape(-1, self._dp_world_size, self._local_batch_size, 3)
        batches: list[Batch] = []
        for identities in by_rank[:, self._dp_rank]:
            batch, windows = empty_batch(self._local_batch_size, self._seq_len)
            for row, window in zip(identities, windows, strict=True):
                self.fill_window(row, window)
            batches.append(batch)
        return BatchesRead(batches, _extend_hash(data_hash, identity))

    def _read_ahead(self, position: Position) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead = (position, self._thread.submit(self.read_position, position))

    def _take_ahead(self) -> tuple[Position, "Future[BatchesRead]"] | None:
        """Return what the thread was reading, once it is done: it shares its caches with us."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].exception()
        return ahead

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches one at a time, without end."""
        while True:
            yield from self.read_step(self._dp_world_size * self._local_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: a little JSON, the same on every rank."""
        return {
            "windows_consumed": self.windows_consumed,
            "data_hash": self.data_hash,
            "data": self._description,
            "accepted": self.accepted,
        }

    def check_state(self, state_dict: dict[str, Any]) -> list[str]:
        """Refuse a position in other data; ranks and batch sizes may have been any.

        Args:
            state_dict: From `state_dict`, or empty.

        Returns:
            The changes that `dataloader.accept_change` accepts, usually none.

        Raises:
            UserError: If the windows or their order were others when the state was saved; the
                message has every difference.
        """
        if not state_dict:
            return []
        if "data" not in state_dict:
            raise UserError(
                "the checkpoint's position in the data was saved by an older titan_loop: resume "
                "with that version, or start anew in another dump_folder"
            )
        changes = data_changes(state_dict["data"], self._description)
        if changes and not self._accept_change:
            raise UserError(
                f"the checkpoint was saved while reading other data: {'; '.join(changes)}. Undo "
                "this, start anew in another dump_folder, or continue in the new data with "
                "--dataloader.accept-change"
            )
        return changes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position in `state_dict`, saved under any split; empty means the start.

        Raises:
            UserError: As `check_state`.
        """
        changes = self.check_state(state_dict)
        if not state_dict:
            return
        self._take_ahead()
        self.windows_consumed = int(state_dict["windows_consumed"])
        self.accepted = list(state_dict["accepted"])
        if changes:
            logger.warning(
                "continuing at window %d in other data, as dataloader.accept_change says: %s",
                self.windows_consumed,
                "; ".join(changes),
            )
            self.accepted.append(
                {
                    "window": self.windows_consumed,
                    "changes": changes,
                    **self._continue_from(state_dict),
                }
            )
            both = f"{state_dict['data_hash']}{self._initial_hash}"
            self.data_hash = hashlib.blake2b(both.encode(), digest_size=16).hexdigest()
        else:
            self._restore(state_dict)
            self.data_hash = str(state_dict["data_hash"])

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Take over what a subclass keeps besides the position; the data is the same."""

    def _continue_from(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Decide where to continue in data that is not the state's; return what to record."""
        return {}

    def _hashed_description(self) -> dict[str, Any]:
        """Return the part of the description that decides what is read."""
        return self._description


def _extend_hash(data_hash: str, identity: np.ndarray) -> str:
    digest = bytes.fromhex(data_hash)
    for row in identity.tolist():
        digest = hashlib.blake2b(digest + _WINDOW_ID.pack(*row), digest_size=16).digest()
    return digest.hex()
