"""The interface of a trainer that the checkpoint manager uses."""

from typing import Any, Protocol


class TrainState(Protocol):
    """A trainer, as the manager sees it."""

    @property
    def at_stage_end(self) -> bool:
        """Whether all tokens of the stage have been trained on."""
        ...

    @property
    def held_back(self) -> bool:
        """True while the newest step must not be saved: its weights may be why it was skipped."""
        ...

    def before_save(self) -> None:
        """Raise an error if the state is unfit to be resumed from."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON that continues the run on any number of ranks."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; raise `UserError` if it is another model's."""

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        """Raise `UserError` if weights from such a state cannot be carried over."""

    def lineage(self) -> dict[str, Any]:
        """Return the run's record beside its state: recipe hash, stage, versions."""
        ...
