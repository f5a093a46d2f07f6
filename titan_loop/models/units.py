"""Units: the modules of a decoder whose weights are gathered, freed and reduced together.

A decoder lists its own (`LoopDecoder.units`). FSDP, the estimates of memory and traffic and `plan`
read the list, so none of them knows what a family consists of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from titan_loop.models.exit_gate import Trainable

LAYERS, OUTSIDE, TABLES, NORM_AND_GATE = (
    "layers",
    "prelude, coda",
    "embedding, head",
    "norm, gate",
)


class Unit(NamedTuple):
    """One or more modules, and when a micro-batch visits them.

    Attributes:
        name: What `plan` calls it; units of one name are listed together.
        modules: Modules; they stay gathered until the last of them ran. A unit inside another one
            is a unit of its own.
        place: Whether it is visited before the recurrent steps, in each of them, or after.
        visits: Number of visits, in every step if it is visited in each.
        between: Number of visits between two steps, beside the others.
        backward_visits: Number of visits in the backward pass; None for the same.
        fp32: Whether it computes in fp32. Such a unit is small, and tensor-parallel ranks each hold
            all of it.
        kept: Whether it stays gathered after a visit unless `fsdp_reshard_after_forward` is always:
            it is small, or its backward pass follows at once.
        reductions: Number of reductions of its gradients, not all of which are complete at once.
        reads_all_states: Whether part of it has a backward pass even for steps that the layers'
            does not reach.
    """

    name: str
    modules: tuple[nn.Module, ...] = ()
    place: Literal["before", "step", "after"] = "step"
    visits: int = 1
    between: int = 0
    backward_visits: int | None = None
    fp32: bool = False
    kept: bool = False
    reductions: int = 1
    reads_all_states: bool = False

    @property
    def is_looped(self) -> bool:
        """Whether it is a part of every step; a coda may be visited in each, and is none."""
        return self.place == "step" and self.name != OUTSIDE

    @property
    def is_revisited(self) -> bool:
        """Whether the number of visits grows with R."""
        return self.place == "step" or self.between > 0

    def visited(self, recurrent_steps: int) -> int:
        """Return the visits of a forward pass of so many steps."""
        others = self.between * (recurrent_steps - 1)
        return self.visits * (recurrent_steps if self.place == "step" else 1) + others

    def visited_back(self, steps_with_backward: int) -> int:
        """Return the visits of a backward pass that reaches so many steps.

        Where it does not reach step 1, the visit between the last steps that it reaches takes the
        place of the embedding's.
        """
        visits = self.visits if self.backward_visits is None else self.backward_visits
        others = self.between * max(0, steps_with_backward - 1)
        return visits * (steps_with_backward if self.place == "step" else 1) + others


@dataclass(frozen=True)
class UnitSize:
    """A unit and its parameters.

    Attributes:
        unit: The unit, without its modules.
        shapes: Name in the model → shape of each of its parameters.
    """

    unit: Unit
    shapes: dict[str, tuple[int, ...]]

    def parameters(self, trainable: Trainable = "all") -> int:
        """Return the number of parameters, or of those that train."""
        return sum(math.prod(shape) for shape in self._of(trainable))

    def shard(self, degree: int, trainable: Trainable = "all") -> int:
        """Return how many elements each rank holds: FSDP shards rows and pads to one a rank."""
        return sum(-(-shape[0] // degree) * math.prod(shape[1:]) for shape in self._of(trainable))

    def _of(self, trainable: Trainable) -> list[tuple[int, ...]]:
        return [
            shape
            for name, shape in self.shapes.items()
            if trainable == "all" or name.startswith("exit_gate.")
        ]


def innermost_first(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return the units in an order in which one inside another comes before it."""
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted(units, key=lambda unit: -max(depth[module] for module in unit.modules))


def unit_sizes_of(model: nn.Module, units: Sequence[Unit]) -> list[UnitSize]:
    """Return the parameters of each unit; every parameter of the model belongs to one.

    Args:
        model: Best on the meta device.
        units: Its units.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes: dict[Unit, dict[str, tuple[int, ...]]] = {}
    for unit in innermost_first(model, units):
        parameters = [p for module in unit.modules for p in module.parameters()]
        shapes[unit] = {names.pop(p): tuple(p.shape) for p in parameters if p in names}
    left = sorted(names.values())
    # In FSDP's root unit they would compute in bf16 and be gathered for the whole pass.
    assert not left, f"{type(model).__name__}.units() has no unit for the parameters {left}"
    return [UnitSize(unit._replace(modules=()), shapes[unit]) for unit in units]
