"""Strict keys: what a job wants to load and what a checkpoint holds are the same entries.

DCP alone ignores what is saved and not wanted. Exceptions are named in a `KeyPolicy`, never taken
for granted, and every entry that one of them covers is returned to be logged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_loop.errors import UserError

SHOWN = 10
OPTIMIZER_PREFIX = "optimizer."
"""How the keys of everything that is not the model begin."""


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """Which differences between wanted and saved entries are meant; none by default.

    Patterns are those of `fnmatch` over whole flattened keys: "optimizer.*", "exit_gate.*".
    """

    ignore_saved: tuple[str, ...] = ()
    """Saved entries that may stay unread."""

    keep_initial: tuple[str, ...] = ()
    """Wanted entries that may be missing from the checkpoint and keep the value they have."""


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """Every entry of both sides, each in one place; flattened keys in sorted order."""

    loaded: list[str]
    ignored: list[str]
    kept: list[str]


def check_keys(
    wanted: Mapping[str, tuple[int, ...] | None],
    saved: Metadata,
    *,
    checkpoint: Path,
    policy: KeyPolicy | None = None,
) -> KeyMatch:
    """Compare what is wanted with what is saved.

    Args:
        wanted: Flattened key -> global shape of a tensor, or None for any other object.
        saved: The checkpoint's metadata.
        checkpoint: Its folder, for the message.
        policy: The differences that are meant.

    Returns:
        Which entries to load, and which ones the policy covers.

    Raises:
        UserError: With the first ten of each kind and their count: entries the checkpoint lacks,
            entries nobody wants, tensors of another shape.
    """
    policy = policy or KeyPolicy()
    shapes = saved_shapes(saved)
    missing, extra = wanted.keys() - shapes.keys(), shapes.keys() - wanted.keys()
    kept, ignored = _covered(missing, policy.keep_initial), _covered(extra, policy.ignore_saved)
    loaded = sorted(wanted.keys() & shapes.keys())
    reshaped = [
        f"{key} is {_shape(shapes[key])} and should be {_shape(wanted[key])}"
        for key in loaded
        if shapes[key] != wanted[key]
    ]
    faults = [
        f"{len(names)} {what}: {_first(names)}"
        for what, names in (
            ("entries are missing", sorted(missing - kept)),
            ("entries are not wanted", sorted(extra - ignored)),
            ("tensors have another shape", reshaped),
        )
        if names
    ]
    if faults:
        raise UserError(
            f"{checkpoint} does not hold what should be loaded ({'; '.join(faults)}); use the "
            "config it was saved with, or say what to carry over"
        )
    return KeyMatch(loaded, sorted(ignored), sorted(kept))


def saved_shapes(metadata: Metadata) -> dict[str, tuple[int, ...] | None]:
    """Return the flattened keys of a checkpoint: shape of a tensor, None for an object."""
    return {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def _covered(keys: Iterable[str], patterns: Iterable[str]) -> set[str]:
    patterns = tuple(patterns)
    return {key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"[{', '.join(map(str, shape))}]"


def _first(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
