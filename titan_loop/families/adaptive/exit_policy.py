"""Halting inside layers that loop: each token on its own, instead of a mixture of iterations."""

from dataclasses import dataclass
from typing import ClassVar

from titan_loop.errors import UserError
from titan_loop.inference.exit_policy import ExitPolicy


@dataclass(frozen=True)
class Survival(ExitPolicy):
    """Layers that loop by themselves do not mix their iterations: each token halts on its own.

    It approximates the trained mixture; `titan-loop analyse survival` measures its error.
    """

    threshold: float
    name: ClassVar[str] = "survival"
    reads_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise UserError(f"exit=survival:{self.threshold} must be above 0 and at most 1")
