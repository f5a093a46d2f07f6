"""Protocols of a trainer, its data and its optimisers, which stand above a checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol


class Stateful(Protocol):
    """Something whose state is JSON that means the same on any number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; raises `UserError` if it is of another model, or other data."""


class Trained(Stateful, Protocol):
    """A trainer."""

    @property
    def at_stage_end(self) -> bool:
        """Whether the stage ends with this step; such a checkpoint is kept for ever."""
        ...

    def may_save(self) -> bool:
        """Return whether this step may be saved; collective. `NonFiniteError` for its weights."""
        ...

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        """Raise `UserError` if the model cannot start from the weights of this state."""

    def lineage(self) -> dict[str, Any]:
        """Return a checkpoint's record of its run."""
        ...


class TrainedData(Stateful, Protocol):
    """A loader."""

    def rank_files(self) -> dict[str, bytes]:
        """Return files with the state of this data-parallel rank alone, by name; mostly none."""
        ...

    def load_rank_files(self, folder: Path) -> None:
        """Restore the state in these files."""

    def jump(self, windows: Iterable[tuple[int, int]]) -> None:
        """Leave out ranges (first, stop) of windows."""


class TrainedMoments(Stateful, Protocol):
    """The optimisers of all parameters; their state holds tensors."""

    def restart_average(self) -> None:
        """Begin the average of the weights with the current ones."""
