"""The policy `survival`, which halts each token inside layers that loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_loop.errors import UserError
from titan_loop.inference.exit_policy import ExitPolicy
from titan_loop.models.decoder import LoopDecoder


@dataclass(frozen=True)
class Survival(ExitPolicy):
    """Halt each token at one iteration of a looping layer, instead of mixing all iterations.

    A token halts once its probability of going on, Π (1 − p_i), falls below `threshold`. The result
    approximates the trained mixture; `titan-loop analyse survival` measures the error.
    """

    threshold: float
    name: ClassVar[str] = "survival"
    reads_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise UserError(f"exit=survival:{self.threshold} must be above 0 and at most 1")

    @contextmanager
    def applied_to(self, model: LoopDecoder) -> Iterator[None]:
        """As in the base class; a decoder of this family applies it."""
        adaptive: Any = model
        adaptive.survival = self.threshold
        try:
            yield
        finally:
            adaptive.survival = None
