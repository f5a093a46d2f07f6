"""The contents of an ONNX file of this family: blocks with norms on both sides of branches."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from titan_loop.formats.onnx_shape import OnnxShape


@dataclass(frozen=True, kw_only=True)
class OuroOnnxShape(OnnxShape):
    """As in the base class, of blocks without options."""

    family: ClassVar[str] = "ouro"

    def checked(self) -> Self:
        return replace(self, block={**self.block, "norm_order": "both"})
