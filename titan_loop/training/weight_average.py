"""An exponential moving average of the weights, kept beside them and saved with the optimisers.

    a ← w                    at the first step
    a ← d·a + (1 − d)·w      at every later one

a is in fp32 and sharded like w; nothing is gathered. Frozen parameters have no average.

Source: Polyak and Juditsky 1992; as an exponential average Tarvainen and Valpola 2017, arXiv
1703.01780, §2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from titan_loop.bounds import Hint
from titan_loop.models.initialisation import local_part


@dataclass(kw_only=True, slots=True)
class WeightAverageConfig:
    """An exponential moving average of the weights, for `eval --ema` and `convert export --ema`."""

    decay: Annotated[float, Ge(0), Lt(1), Hint("0.999 is usual")] = 0.0
    """Share of the average that an update keeps, such as 0.999; 0 keeps no average."""


class WeightAverage:
    """The average of a model's weights, equal to them until `updates` exceeds 0."""

    def __init__(self, config: WeightAverageConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = weights
        self._average = {
            name: torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
            for name, weight in weights.items()
        }
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        if self.updates == 0:
            self._restart()
        else:
            averages, weights = self._local()
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                averages, weights, weight=1 - self._config.decay
            )
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the average's own tensors, not copies; any number of ranks can load them."""
        if self.updates == 0:
            self._restart()
        return {"updates": self.updates, **self._average}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state, whose tensors may be this average's own."""
        self.updates = state_dict["updates"]
        for name, average in self._average.items():
            if state_dict[name] is not average:
                average.copy_(state_dict[name])

    @torch.no_grad()
    def _restart(self) -> None:
        torch._foreach_copy_(*self._local())  # pyright: ignore[reportPrivateImportUsage]

    def _local(self) -> tuple[list[Tensor], list[Tensor]]:
        averages = [local_part(average) for average in self._average.values()]
        return averages, [local_part(weight).float() for weight in self._weights.values()]
