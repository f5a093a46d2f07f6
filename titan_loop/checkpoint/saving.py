"""Writes one checkpoint on all ranks together, in whatever thread it is called from.

    every rank   DCP writes its shard ─► sizes and SHA-256 of its files ─┐
    rank 0       all ranks' records, or what went wrong ◄────────────────┘
                 ─► manifest (the commit) ─► the keep policy deletes
    every rank   learns the outcome

All of it runs over one gloo group that nothing else uses, so an asynchronous save never mixes with
training's collectives. A save that fails on any rank is tried again by all of them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from titan_loop.checkpoint.dcp_errors import root_cause
from titan_loop.checkpoint.files import FileRecord, file_records, rank_files
from titan_loop.checkpoint.manifest import Reference, write_manifest
from titan_loop.checkpoint.retention import discard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a save is tried, and the seconds before the second try; they double each time."""

    attempts: int
    wait_seconds: float


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
) -> Reference | None:
    """Write and commit a checkpoint; collective over `group`.

    Args:
        checkpoint: Its folder; what an earlier attempt left there is deleted first.
        state_dict: Returns tensors and objects that nobody changes until this returns; what it
            raises counts as a failure of the save.
        content: The manifest without `files`.
        group: A gloo group of all ranks.
        retry: What to do when it fails.
        on_commit: Called on rank 0 after the commit; what it raises is logged, since nothing may
            undo a commit.

    Returns:
        On rank 0, what a descendant's lineage says of the checkpoint; None elsewhere.

    Raises:
        SaveFailedError: On every rank, when no attempt succeeded on all of them.
    """
    for attempt in range(1, retry.attempts + 1):
        written, reason = _attempt(checkpoint, state_dict, content, group)
        if reason is None:
            if dist.get_rank(group) == 0:
                try:
                    on_commit()
                except Exception:
                    logger.exception("%s is saved, but what should follow failed", checkpoint)
            return written
        wait = retry.wait_seconds * 2 ** (attempt - 1)
        if dist.get_rank(group) == 0:
            logger.error(
                "Saving %s failed (attempt %d of %d): %s",
                checkpoint,
                attempt,
                retry.attempts,
                reason,
            )
        if attempt == retry.attempts:
            raise SaveFailedError(f"{checkpoint} was not saved: {reason}")
        time.sleep(wait)
    raise AssertionError("a retry policy has at least one attempt")


def _attempt(
    checkpoint: Path,
    state_dict: Callable[[], dict[str, Any]],
    content: dict[str, Any],
    group: dist.ProcessGroup,
) -> tuple[Reference | None, str | None]:
    """Try once; return rank 0's reference, and on every rank what went wrong on one of them."""
    rank = dist.get_rank(group)
    records: dict[str, FileRecord] = {}
    gathered: list[dict[str, FileRecord]] = [{} for _ in range(dist.get_world_size(group))]
    tensors: dict[str, Any] = {}
    committed: list[Reference] = []

    def write() -> None:
        save(tensors, checkpoint_id=str(checkpoint), process_group=group)
        records.update(file_records(checkpoint, rank_files(checkpoint, rank)))

    def commit() -> None:
        files = {name: record for part in gathered for name, record in part.items()}
        committed.append(write_manifest(checkpoint, {**content, "files": files}))

    # A killed save, or an older attempt at this step, may have left files of another world size.
    reason = _agree(group, lambda: discard(checkpoint), on_rank_zero_only=True)
    if reason is None:
        # Before DCP's own collectives: a rank that fails here must not leave the others in them.
        reason = _agree(group, lambda: tensors.update(state_dict()))
    if reason is None:
        reason = _agree(group, write)
    if reason is None:
        dist.all_gather_object(gathered, records, group=group)
        reason = _agree(group, commit, on_rank_zero_only=True)
    if reason is not None and rank == 0:
        try:
            discard(checkpoint)  # half a checkpoint only takes up the space the next one needs
        except OSError as error:
            logger.warning("%s could not be cleaned up: %s", checkpoint, error)
    return (committed[0] if committed else None), reason


def _agree(
    group: dist.ProcessGroup, action: Callable[[], None], *, on_rank_zero_only: bool = False
) -> str | None:
    """Run `action`; return on every rank the first failure of any of them, or None.

    Any exception counts: whatever keeps a checkpoint from being written, training is worth more.
    """
    rank = dist.get_rank(group)
    failure = None
    try:
        if rank == 0 or not on_rank_zero_only:
            action()
    except (Exception, CheckpointException) as error:  # DCP's is not an Exception
        cause = root_cause(error)
        if not isinstance(cause, Exception):
            raise cause from error  # someone pressed Ctrl-C
        logger.debug("A step of saving failed", exc_info=True)
        failure = f"{type(cause).__name__}: {cause} (rank {rank})".replace("\n", " ")
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    return next((reason for reason in failures if reason is not None), None)
