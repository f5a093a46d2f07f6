"""The interface of a loader: global batches, and a position that proves what was read.

A job consumes windows; a global batch is the next run of them, over all ranks and micro-batches. A
loader's state is the number of windows consumed, a hash of them, and a description of the data in a
few readable fields. A resume in other data is refused because the descriptions differ, or accepted
with a record of the differences.
"""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

# isort: split

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader

from titan_loop.data.columns import Column
from titan_loop.data.load.jumps import joined, jumped_before, next_windows
from titan_loop.data.tasks.curriculum import Curriculum
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError
from titan_loop.ranks import warn_together

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input", "positions"}, labels): int64 tensors (b, L); beside the first, declared columns."""

SOURCES = "sources"
"""Field of a description that lists the sources."""

_NAMES = {
    "seq_len": "training.seq_len",
    "seed": "dataloader.seed",
    "when_exhausted": "dataloader.when_exhausted",
}

Fields = Mapping[str, Any]


class DataVocabulary(NamedTuple):
    """Sizes that a model takes from its data.

    Attributes:
        size: Tokens of the tokenizer.
        largest_token: Largest id that occurs, which may be beyond them.
        options: Further model options that follow from the data, with the least that fits.
    """

    size: int
    largest_token: int
    options: Mapping[str, tuple[int, ...]] = MappingProxyType({})


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


class GlobalBatchLoader(BaseDataLoader):
    """The interface the trainer uses: global batches, a position in the data, and its hash.

    Args:
        config: Its `accept_change` and `columns`.
        description: Everything the data and its order depend on, in readable JSON fields; starts
            the hash. A saved position is only valid where the description is the same.
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This process's data-parallel rank.
        local_batch_size: Windows in a micro-batch of one rank.
        seq_len: L.
        tokenizer: torchtitan's, not used: loaders read token ids, or bring a tokenizer.
        snapshot_every_n_steps: torchtitan's, not used: the state is current at every step.

    Attributes:
        columns: Declared columns of the batches, in the description where there are any.
        windows_consumed: Windows read or jumped over by all ranks together since the job's start.
        jumped: Ranges (first, stop) of windows that are jumped over.
        data_hash: 32 hexadecimal digits over the description and what was read, in order.
        accepted: One record for every change of the data that was accepted when resuming.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Options of every loader, and what it can say before it is built."""

        prefetch: bool = True
        """Read the next global batch in a thread while this one trains."""

        accept_change: bool = False
        """Continue a checkpoint in other data; the changes are logged and recorded."""

        def vocabulary(self) -> DataVocabulary:
            """Return the vocabulary of the data."""
            raise NotImplementedError

        def source_paths(self) -> list[str]:
            """Return the prepared sources that have a held-out split; none for generated tasks."""
            raise NotImplementedError

        def source_weights(self) -> dict[str, float]:
            """Return the shares of `source_paths` in the data, by path; any positive sum."""
            return dict.fromkeys(self.source_paths(), 1.0)

        def generated_task(self) -> Task | None:
            """Return the generated task whose examples are read; None for text."""
            return None

        def knows_depth(self) -> bool:
            """Return whether the loader can say how many recurrent steps its windows need."""
            return False

        def most_steps(self) -> int | None:
            """Return how many recurrent steps its deepest window may need, if that is known."""
            return None

        def few_labels(self) -> bool:
            """Return whether so few tokens have a label that the readout should skip the others."""
            return False

        def columns(self) -> tuple[Column, ...]:
            """Return the columns that batches have besides tokens, positions and labels."""
            return ()

        def can_jump(self) -> bool:
            """Return whether its windows have numbers, so that some can be jumped over."""
            return False

        def promotion(self) -> Curriculum | None:
            """Return the curriculum that decides on the level of the task; None without."""
            return None

    def __init__(
        self,
        config: "GlobalBatchLoader.Config",
        description: Mapping[str, Any],
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        seq_len: int,
        tokenizer: Any = None,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        self._accept_change = config.accept_change
        self.columns = config.columns()
        self._promotion = config.promotion()
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

    @abstractmethod
    def read(self, position: Position) -> BatchesRead:
        """Read this rank's part of a global batch, without consuming it.

        Raises:
            UserError: If the data ends, or a file can no longer be read.
        """

    def deepest(self, windows: int) -> int:
        """Return the recurrent steps that the deepest of the next `windows` windows needs.

        The same on every rank, and nothing is consumed; only for loaders that know the depth.
        """
        raise NotImplementedError

    def progress(self) -> list[SourceProgress]:
        """Return how far each source has been read; none for generated tasks."""
        return []

    def log_progress(self, step: int) -> None:
        """Log how far every source was read by the end of a training step, if there are any."""
        progress = self.progress()
        sources = ", ".join(f"{s.name} {s.tokens} ({s.epochs:.3f} epochs)" for s in progress)
        if sources:
            logger.info("tokens read by step %d: %s", step, sources)

    def log_sources(self, windows: int) -> None:
        """Log what a job of this many windows reads; called once, when training starts."""

    def require_windows(self, windows: int) -> None:
        """Refuse a job of this many windows if the data ends before.

        Raises:
            UserError: The data ends before; the message says what to change.
        """

    @property
    def level(self) -> int:
        """Level of the curriculum that the next window is of."""
        return 0

    @property
    def level_start(self) -> int:
        """First window of that level."""
        return 0

    def promote(self) -> None:
        """Go on to the next level of the curriculum with the next window; equal on all ranks."""
        raise NotImplementedError

    @property
    def rate_start_tokens(self) -> int:
        """Tokens at which the schedule of the learning rate began; 0 unless a level restarts it."""
        curriculum = self._promotion
        restarts = curriculum is not None and curriculum.restart_learning_rate
        if not restarts:
            return 0
        return (self.level_start - jumped_before(self.level_start, self.jumped)) * self._seq_len

    def jump(self, windows: Iterable[tuple[int, int]]) -> None:
        """Leave out ranges (first, stop) of windows from now on; equal on all ranks."""
        self.jumped = joined([*self.jumped, *windows])

    def next_windows(self, first: int, count: int) -> np.ndarray:
        """Return the numbers of the `count` windows from `first` on that are not jumped over."""
        return next_windows(first, count, self.jumped)

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
        read = self.read(position)
        numbers = self.next_windows(self.windows_consumed, global_batch_windows)
        self.windows_consumed = int(numbers[-1]) + 1
        self.data_hash = read.data_hash
        return read.batches

    def close(self) -> None:
        """Stop reading ahead, in loaders that do; nothing read ahead was consumed."""

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

    def check_state(self, state_dict: dict[str, Any]) -> list[str]:
        """Refuse a position in other data; ranks and batch sizes may have been any.

        Args:
            state_dict: From `state_dict`, or empty.

        Returns:
            The changes that `dataloader.accept_change` accepts, usually none.

        Raises:
            UserError: If the state was saved while reading other windows or another order; the
                message lists every difference.
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
        self.windows_consumed = int(state_dict["windows_consumed"])
        self.accepted = list(state_dict["accepted"])
        self.jumped = [(first, stop) for first, stop in state_dict.get("jumped", [])]
        if changes:
            warn_together(
                logger,
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


def data_changes(saved: Fields, here: Fields) -> list[str]:
    """Return one phrase per difference, "FIELD OLD → NEW"; none if the data is the same.

    Sources are matched by their path, then by their contents: a folder that was moved is the same.

    Args:
        saved: The description in the checkpoint.
        here: The description of this start; `sources`, if there, lists one per source.
    """
    changes = _field_changes(saved, here, ignored=(SOURCES,))
    saved_sources, here_sources = saved.get(SOURCES, []), here.get(SOURCES, [])
    matches = match_sources(saved_sources, here_sources)
    for source, match in zip(here_sources, matches, strict=True):
        if match is None:
            changes.append(f"source {source['path']} is new (share {source['share']:g})")
        elif found := _field_changes(saved_sources[match], source, ignored=("path",)):
            changes.append(f"source {source['path']}: {', '.join(found)}")
    changes += [
        f"source {source['path']} is gone"
        for index, source in enumerate(saved_sources)
        if index not in matches
    ]
    known = [match for match in matches if match is not None]
    if known != sorted(known):
        changes.append("the sources are in another order")
    return changes


def match_sources(saved: Sequence[Fields], here: Sequence[Fields]) -> list[int | None]:
    """Return for each source of `here` which one of `saved` it is, or None if it is new."""
    matches: list[int | None] = [None] * len(here)
    for field in ("path", "contents"):
        for index, source in enumerate(here):
            if matches[index] is None:
                candidates = (
                    number
                    for number, known in enumerate(saved)
                    if number not in matches and known[field] == source[field]
                )
                matches[index] = next(candidates, None)
    return matches


def _field_changes(saved: Fields, here: Fields, ignored: Sequence[str]) -> list[str]:
    return [
        f"{_NAMES.get(key, key)} {saved.get(key)} → {here.get(key)}"
        for key in {**saved, **here}
        if key not in ignored and saved.get(key) != here.get(key)
    ]
