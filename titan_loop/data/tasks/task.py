"""What a generated task offers to whoever evaluates a model that was trained on it.

A loader's Config returns its task (`GlobalWindowLoader.Config.task`); a checkpoint of a run says
which task the run read, whatever version wrote it (`recorded_task`).
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from titan_loop.data.tasks.mano import NAME, Mano
from titan_loop.errors import UserError

TASK = "task"
"""Field of a loader's description that names the task."""


class Task(Protocol):
    """Examples made of token ids: a prompt, and an answer of one token."""

    @property
    def name(self) -> str:
        """What suites and reports call it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def exam(self, count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return held-out examples, never trained on, of the task's greatest difficulty.

        Args:
            count: Number of examples.
            seed: Chooses the examples.

        Returns:
            Prompts (count, P) int64 without padding, and answers (count,) int64: the id that should
            be the most probable one after a prompt's last token.

        Raises:
            UserError: The task has too few examples.
        """
        ...


def recorded_task(loader_state: Mapping[str, Any]) -> Task | None:
    """Return the task that a run was reading when it saved a checkpoint; None for text.

    Args:
        loader_state: The loader's `state_dict`, which is a manifest's `data`; empty for an imported
            model.

    Raises:
        UserError: For a task that this version does not know.
    """
    data = loader_state.get("data", {})
    name = data.get(TASK)
    if name is None:
        return None
    if name != NAME:
        raise UserError(
            f"the checkpoint was trained on the task {name!r}, which this version does not know: "
            "use the version of titan_loop that trained it"
        )
    return Mano(data["modulus"], data["max_operations"])
