"""An optimiser as the run sees it: its settings, the parameters it takes, its moments.

A new optimiser is a file beside this one and a field of `RunConfig`, whose name `optimizer.name`
then chooses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.optim import Optimizer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config.configs import ParallelismConfig, TrainingConfig

from titan_loop.errors import Refusal
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.parameter_groups import ParameterGroup


@dataclass(kw_only=True, slots=True)
class GroupSettings(ParamGroupConfig):
    """torchtitan's config of a parameter group, with a rate factor; `pattern` is filled in last."""

    rate_factor: float


@dataclass(kw_only=True, slots=True)
class OptimizerSettings:
    """Settings of one optimiser.

    Attributes:
        factory: Makes it from parameter groups.
        moments: Number of fp32 values that it keeps for each weight.
        takes_all: False if it is for matrices of the layers alone; AdamW takes the rest.
    """

    title: ClassVar[str]
    factory: ClassVar[Callable[..., Optimizer]]
    moments: ClassVar[int]
    takes_all: ClassVar[bool] = True

    def settings(self, group: ParameterGroup) -> GroupSettings:
        """Return the settings of one of the model's groups."""
        raise NotImplementedError

    def factory_arguments(self) -> dict[str, Any]:
        """Return further arguments of `factory`."""
        return {}

    def refusals(
        self, *, trainable: Trainable, training: TrainingConfig, parallelism: ParallelismConfig
    ) -> Iterator[Refusal]:
        """Refuse a run in which it does not work."""
        yield from ()

    def _group(self, rate_factor: float, **arguments: Any) -> GroupSettings:
        return GroupSettings(
            pattern="",
            optimizer_name=self.title,
            optimizer_kwargs={"lr": 0.0, **arguments},
            rate_factor=rate_factor,
        )
