"""The contents of an ONNX file of this family: blocks with norms on both sides of branches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from titan_loop.formats.onnx_shape import OnnxShape


@dataclass(frozen=True, kw_only=True)
class OuroOnnxShape(OnnxShape):
    """As in the base class, of blocks without options."""

    family: ClassVar[str] = "ouro"

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        """As in the base class."""
        shape = super().from_architecture(
            architecture, recurrent_steps=recurrent_steps, max_positions=max_positions
        )
        return replace(shape, block={**shape.block, "norm_order": "both"})
