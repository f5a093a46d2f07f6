"""Loads a checkpoint of any world size, if it holds exactly the entries that are wanted.

By itself, DCP ignores saved entries that nobody asked for. Here a `KeyPolicy` names the exceptions,
and every entry that it covers is logged.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load

from titan_loop.checkpoint.safe_reading import PlainLoadPlanner, SafeFileSystemReader, root_cause
from titan_loop.checkpoint.tensor_table import read_table
from titan_loop.errors import UserError, listed
from titan_loop.ranks import from_rank_zero

logger = logging.getLogger(__name__)

SHOWN = 10
OPTIMIZER_PREFIX = "optimizer."
"""Beginning of the keys of everything that is not the model."""

AVERAGE_PREFIX = "optimizer.ema."
"""Beginning of the keys of averaged weights; the parameter's name follows."""


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """Differences between wanted and saved entries that are allowed; none by default.

    `fnmatch` patterns over whole flattened keys: "optimizer.*", "exit_gate.*".

    Attributes:
        ignore_saved: Saved entries that may stay unread.
        keep_initial: Wanted entries that may be missing and then keep the value they have.
    """

    ignore_saved: tuple[str, ...] = ()
    keep_initial: tuple[str, ...] = ()


EXACTLY = KeyPolicy()


def load_checkpoint(
    state_dict: dict[str, Any],
    checkpoint: Path,
    *,
    group: dist.ProcessGroup | None,
    policy: KeyPolicy = EXACTLY,
) -> None:
    """Load a checkpoint of any world size into `state_dict`, in place; collective over `group`.

    Args:
        state_dict: Allocated tensors and objects, as for `torch.distributed.checkpoint.load`.
        group: A gloo group of all ranks; None loads into this process alone.

    Raises:
        UserError: On every rank: the entries differ, or something in the files is forbidden.
        DamagedCheckpointError: On every rank: a file is missing, truncated or garbled.
    """
    # Not left to DCP: it would swallow the error, and look for metadata of single ranks.
    metadata = from_rank_zero(group, lambda: read_table(checkpoint))
    try:
        with warnings.catch_warnings():
            # Without a group, this process loads alone.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(
                state_dict,
                storage_reader=SafeFileSystemReader(checkpoint, metadata),
                planner=_StrictLoadPlanner(checkpoint, policy),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise root_cause(error) from error


class _StrictLoadPlanner(PlainLoadPlanner):
    """Plans to read the wanted entries, if they equal the saved ones."""

    def __init__(self, checkpoint: Path, policy: KeyPolicy) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._policy = policy

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        wanted = {
            key: tuple(value.shape) if isinstance(value, torch.Tensor) else None
            for key, value in self.state_dict.items()
        }
        checkpoint, policy = self._checkpoint, self._policy
        loaded, ignored, kept = check_keys(
            wanted, self.metadata, checkpoint=checkpoint, policy=policy
        )
        for entries, what in (
            (ignored, "entries of %s are not loaded, as asked: %s"),
            (kept, "entries are not in %s and keep their initial value, as asked: %s"),
        ):
            if entries:
                logger.info(f"%d {what}", len(entries), checkpoint, listed(entries, SHOWN))
        chosen = {key: self.state_dict[key] for key in loaded}
        return create_default_local_load_plan(chosen, self.metadata)


def check_keys(
    wanted: Mapping[str, tuple[int, ...] | None],
    saved: Metadata,
    *,
    checkpoint: Path,
    policy: KeyPolicy = EXACTLY,
) -> tuple[list[str], list[str], list[str]]:
    """Return the keys that are loaded, stay unread, or keep their initial value.

    `wanted` has the global shape of each tensor by flattened key, None for any other object.
    `UserError` names the first ten entries that are missing, not wanted or of another shape.
    """
    shapes = {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in saved.state_dict_metadata.items()
    }
    missing, extra = wanted.keys() - shapes.keys(), shapes.keys() - wanted.keys()
    kept, ignored = _covered(missing, policy.keep_initial), _covered(extra, policy.ignore_saved)
    loaded = sorted(wanted.keys() & shapes.keys())
    reshaped = [
        f"{key} is {_shape(shapes[key])} and should be {_shape(wanted[key])}"
        for key in loaded
        if shapes[key] != wanted[key]
    ]
    faults = [
        f"{len(names)} {what}: {listed(names, SHOWN)}"
        for what, names in (
            ("entries are missing", sorted(missing - kept)),
            ("entries are not wanted", sorted(extra - ignored)),
            ("tensors have another shape", reshaped),
        )
        if names
    ]
    if faults:
        wrong = (missing - kept) | (extra - ignored)
        of_moments = not reshaped and all(key.startswith(OPTIMIZER_PREFIX) for key in wrong)
        fix = "start from it without its moments (--checkpoint.carry.no-optimizer)"
        raise UserError(
            f"{checkpoint} does not hold the entries to load ({'; '.join(faults)}); use the "
            f"config it was saved with, or {fix if of_moments else 'set checkpoint.carry'}"
        )
    return loaded, sorted(ignored), sorted(kept)


def _covered(keys: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    return {key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not a tensor" if shape is None else f"[{', '.join(map(str, shape))}]"
