"""Units: the modules of a decoder whose weights are gathered, freed and reduced together.

FSDP and `plan` read `LoopDecoder.units`, so neither knows a family's modules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from titan_loop.models.exit_gate import Trainable

LAYERS, OUTSIDE, EXPERTS = "layers", "prelude, coda", "experts"
TABLES, NORM_AND_GATE = "embedding, head", "norm, gate"


class Unit(NamedTuple):
    """One or more modules, and when a micro-batch visits them.

    Attributes:
        name: Name in `plan`, which lists units of the same name together.
        modules: They stay gathered until the last of them ran; a unit may be inside another.
        place: Time of its visits: before the recurrent steps, in each, between every two, or after.
        between: Whether it is also visited between every two steps.
        gathered_in_backward: False where the backward pass needs no weight.
        fp32: Whether it computes in fp32 and stays whole under tensor parallelism; it is small.
        spread: Whether expert parallelism spreads it, so that FSDP shards over the other ranks.
        kept: Whether it stays gathered after a visit, unless FSDP reshards always.
    """

    name: str
    modules: tuple[nn.Module, ...] = ()
    place: Literal["before", "step", "between", "after"] = "step"
    between: bool = False
    gathered_in_backward: bool = True
    fp32: bool = False
    kept: bool = False
    spread: bool = False

    @property
    def is_looped(self) -> bool:
        """Whether it is a part of every step; a coda is not, though each step may visit it."""
        return self.place in ("step", "between") and self.name != OUTSIDE

    @property
    def is_revisited(self) -> bool:
        """Whether the number of visits grows with R."""
        return self.place in ("step", "between") or self.between


def with_experts(units: Sequence[Unit], sparse: Sequence[nn.Module]) -> list[Unit]:
    """Return units in which the experts of sparse layers are units of their own."""
    found: list[Unit] = []
    for unit in units:
        found.append(unit)
        for layer in unit.modules:
            if layer in sparse:
                experts = layer.get_submodule("moe.routed_experts")
                found.append(unit._replace(name=EXPERTS, modules=(experts,), spread=True))
    return found


@dataclass(frozen=True)
class UnitSize:
    """A unit without its modules, and the shapes of its parameters by their names."""

    unit: Unit
    shapes: dict[str, tuple[int, ...]]

    def parameters(self, trainable: Trainable = "all") -> int:
        """Return the number of parameters: all, or only the exit gate's."""
        return sum(math.prod(shape) for shape in self._of(trainable))

    def shard(self, degree: int, trainable: Trainable = "all") -> int:
        """Return the elements on each rank: FSDP shards rows and pads every rank to the most."""
        return sum(
            -(-shape[axis] // degree) * math.prod(shape) // shape[axis]
            for shape in self._of(trainable)
            for axis in [sharded_axis(shape, degree)]
        )

    def _of(self, trainable: Trainable) -> list[tuple[int, ...]]:
        return [
            shape
            for name, shape in self.shapes.items()
            if trainable == "all" or name.startswith("exit_gate.")
        ]


def sharded_axis(shape: Sequence[int], degree: int) -> int:
    """Return the axis that FSDP cuts: 0, or the rows of a stack with fewer matrices than ranks.

    FSDP cuts any axis but the first into equal parts only; if the rows do not divide, it cuts 0.
    """
    stack = len(shape) == 3 and shape[0] < degree
    return 1 if stack and shape[1] % degree == 0 else 0


def innermost_first(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return the units in an order in which one inside another comes before it."""
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted(units, key=lambda unit: -max(depth[module] for module in unit.modules))


def unit_sizes_of(model: nn.Module, units: Sequence[Unit]) -> list[UnitSize]:
    """Return the parameters of each unit; every parameter of the model belongs to one."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes: dict[Unit, dict[str, tuple[int, ...]]] = {}
    for unit in innermost_first(model, units):
        parameters = [p for module in unit.modules for p in module.parameters()]
        shapes[unit] = {names.pop(p): tuple(p.shape) for p in parameters if p in names}
    left = sorted(names.values())
    # In FSDP's root unit they would compute in bf16 and be gathered for the whole pass.
    assert not left, f"{type(model).__name__}.units() has no unit for the parameters {left}"
    return [UnitSize(unit._replace(modules=()), shapes[unit]) for unit in units]
