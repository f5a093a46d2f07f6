"""The part of a trainer that the checkpoint manager uses."""

from typing import Any, Protocol


class TrainState(Protocol):
    """A trainer, as the manager sees it."""

    @property
    def at_stage_end(self) -> bool:
        """Whether all tokens of the stage have been trained on."""
        ...

    @property
    def held_back(self) -> bool:
        """True while the newest step must not be saved: it was skipped, maybe for bad weights."""
        ...

    def before_save(self) -> None:
        """Raise an error if the state is unfit to be resumed from."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON from which any number of ranks can continue the run."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; raise `UserError` if another model saved it."""

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        """Raise `UserError` if this model cannot start from the weights of a saved state."""

    def lineage(self) -> dict[str, Any]:
        """Return the run's origin for the manifest: recipe hash, stage, library versions."""
        ...
