"""Writes one checkpoint on all ranks together, in the calling thread; the README draws the order.

Nothing else uses the gloo group of a save, so an asynchronous one never mixes with training's
collectives. If a save fails on any rank, all of them try again.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from titan_loop.checkpoint.folders import discard
from titan_loop.checkpoint.manifest import FileRecord, Reference, file_records, write_manifest
from titan_loop.checkpoint.safe_reading import root_cause
from titan_loop.checkpoint.tensor_table import TableWriter
from titan_loop.checkpoint.trained import TrainedData
from titan_loop.errors import UserError
from titan_loop.ranks import from_all_ranks, try_on_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts, and seconds before the second one, which double each time."""

    attempts: int
    wait_seconds: float

    def each(self) -> Iterator[str]:
        """Yield "attempt 1 of N", then wait before yielding each further attempt."""
        for attempt in range(1, self.attempts + 1):
            if attempt > 1:
                time.sleep(self.wait_seconds * 2 ** (attempt - 2))
            yield f"attempt {attempt} of {self.attempts}"


class SaveFailedError(OSError):
    """A checkpoint could not be written; the older ones are untouched."""


def save_checkpoint(
    checkpoint: Path,
    state_dict: Callable[[], dict[str, Any]],
    content: dict[str, Any],
    *,
    group: dist.ProcessGroup,
    retry: RetryPolicy,
    on_commit: Callable[[], None],
    rank_files: Mapping[str, bytes] | None = None,
) -> Reference | None:
    """Write and commit a checkpoint; collective over `group`. Return its reference on rank 0.

    If no attempt succeeds on all ranks, all raise `SaveFailedError`.

    Args:
        state_dict: Returns tensors and objects, which must not change until this function
            returns; an exception counts as a failure of the save.
        on_commit: Called on rank 0 after the commit; its errors are logged, since nothing may undo
            a commit.
        rank_files: Content of further files, by name, that this rank writes.
    """
    rank, reason = dist.get_rank(group), None
    for attempt in retry.each():
        written, reason = _attempt(checkpoint, state_dict, content, rank_files or {}, group)
        if reason is None:
            if rank == 0:
                try:
                    on_commit()
                except Exception:
                    logger.exception("%s is saved, but the work after it failed", checkpoint)
            return written
        if rank == 0:
            logger.error("Saving %s failed (%s): %s", checkpoint, attempt, reason)
    raise SaveFailedError(f"{checkpoint} was not saved: {reason}")


def _attempt(
    checkpoint: Path,
    state_dict: Callable[[], dict[str, Any]],
    content: dict[str, Any],
    rank_files: Mapping[str, bytes],
    group: dist.ProcessGroup,
) -> tuple[Reference | None, str | None]:
    """Try once; return the reference (None except on rank 0), and on every rank the first error.

    Each stage is collective and ends in `try_on_all`, so all ranks skip the later ones together.
    """
    rank = dist.get_rank(group)
    tensors: dict[str, Any] = {}
    results: list[Any] = []  # of the stage before, by rank

    def clear() -> None:
        # A killed save, or an older attempt at this step, may have left files of another world.
        if rank == 0:
            discard(checkpoint)

    def copy() -> None:
        tensors.update(state_dict())

    def write() -> dict[str, FileRecord]:
        try:
            writer = TableWriter(checkpoint)
            save(tensors, checkpoint_id=checkpoint, storage_writer=writer, process_group=group)
        except CheckpointException as error:
            raise root_cause(error) from error
        for name, further in rank_files.items():
            with (checkpoint / name).open("wb") as file:
                file.write(further)
                file.flush()
                os.fsync(file.fileno())
        return file_records(checkpoint, rank, [*rank_files])

    def commit() -> Reference | None:
        if rank != 0:
            return None
        files = {name: record for part in results for name, record in part.items()}
        return write_manifest(checkpoint, {**content, "files": files})

    # `copy` before DCP's own collectives in `write`: a rank that fails there must not leave the
    # others in them. `commit` last: every file that the manifest lists is on the disk by then.
    for stage in (clear, copy, write, commit):
        results, failure = try_on_all(group, stage)
        if failure is not None:
            break
    else:
        return results[rank], None
    logger.debug("Saving failed", exc_info=failure.error)
    try:
        clear()  # half a checkpoint only takes up the space the next one needs
    except OSError as error:
        logger.warning("%s could not be cleaned up: %s", checkpoint, error)
    cause = f"{type(failure.error).__name__}: {failure.error} (rank {failure.rank})"
    return None, cause.replace("\n", " ")


def own_rank_files(group: dist.ProcessGroup, data: TrainedData) -> dict[str, bytes]:
    """Return the files of the data's state that this rank writes: the first rank of several.

    Raises `UserError` if ranks that must read the same data have not.
    """
    files: dict[str, bytes] = {}

    def digests() -> dict[str, str]:
        files.update(data.rank_files())
        return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}

    every = from_all_ranks(group, digests)
    first = {name: rank for rank, each in reversed([*enumerate(every)]) for name in each}
    for rank, each in enumerate(every):
        if other := [name for name in each if each[name] != every[first[name]][name]]:
            raise UserError(
                f"rank {rank} has read other data than rank {first[other[0]]}, whose part of the "
                "model reads the same: dataloader.pipeline must do the same in every process that "
                "asks for the same rank; set its seeds"
            )
    return {name: files[name] for name in files if first[name] == dist.get_rank(group)}


def staged(
    copies: DefaultStager, tensors: Callable[[], dict[str, Any]]
) -> "Future[dict[str, Any]]":
    """Copy the state; an error goes into the future, so that the save fails on all ranks."""
    done: Future[dict[str, Any]] = Future()
    try:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the stager copies on another stream
        copy = copies.stage(tensors())
    except Exception as error:
        done.set_exception(error)
        return done
    if isinstance(copy, Future):
        return copy
    done.set_result(copy)
    return done


def stager(mode: str) -> DefaultStager:
    """Return the stager that copies the state; it allocates its buffers once."""
    # Pinned memory and a stream for the copies exist with CUDA alone (never run on a GPU); on a CPU
    # the same calls copy in a thread.
    overlapped = mode == "async_with_pinned_mem"
    on_cuda = overlapped and torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=on_cuda,
        use_shared_memory=False,  # a thread writes, not another process
        use_async_staging=overlapped,
        use_non_blocking_copy=on_cuda,
    )
    return DefaultStager(options)
