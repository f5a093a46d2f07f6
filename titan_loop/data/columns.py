"""Named columns of batches, beside token ids, positions and labels.

A loader declares its columns for the model's forward pass, the objective or both. The declaration
is part of the data's description, and so of the hash.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

OWN_NAMES = ("input", "positions", "labels")
"""Names in every batch, which no column may have."""

LABELLED = "labelled"
"""Indices into the flattened batch of the tokens with a label; present where few have one."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Declaration of one column.

    Attributes:
        dtype: Type of its numbers; the model sees floats in its own precision.
        shape: Dimensions of one value; () for a number.
        per_token: Whether every token has a value, (b, L, *shape), which context parallelism splits
            like the tokens. Otherwise every window has one, (b, *shape), on all its ranks.
    """

    name: str
    reader: Literal["model", "loss", "both"]
    dtype: Literal["int64", "float32", "bool"] = "int64"
    shape: tuple[int, ...] = ()
    per_token: bool = True

    def __post_init__(self) -> None:
        assert self.name not in (*OWN_NAMES, LABELLED), f"{self.name} is a column of every batch"

    def batch_shape(self, count: int, seq_len: int) -> tuple[int, ...]:
        """Return the shape of the column in a batch of `count` windows."""
        return (count, seq_len, *self.shape) if self.per_token else (count, *self.shape)

    def description(self) -> dict[str, Any]:
        """Return the declaration as JSON values."""
        return {**asdict(self), "shape": [*self.shape]}


def columns_for(
    reader: Literal["model", "loss"], columns: Iterable[Column], batch: Mapping[str, _Value]
) -> dict[str, _Value]:
    """Return the declared columns of a batch that the model, or the loss, reads."""
    return {c.name: batch[c.name] for c in columns if c.reader in (reader, "both")}
