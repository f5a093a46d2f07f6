"""The contents of an ONNX file of this family: bridge, mixer and damped steps, no adapters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from titan_loop.formats.onnx_shape import OnnxShape

if TYPE_CHECKING:
    from titan_loop.formats.onnx_graph import Graph


@dataclass(frozen=True, kw_only=True)
class RetrofitOnnxShape(OnnxShape):
    """A loop that may read its prelude again; attributes as the options of the same names."""

    family: ClassVar[str] = "retrofit"
    of_model: ClassVar[Mapping[str, str]] = {
        **OnnxShape.of_model,
        "bridge.": "bridge.",
        "bridge.norm.": "bridge.norm.",
        "mixer.": "mixer.",
    }

    bridge: bool = False
    mixer: bool = False
    start_noise: float = 0.0
    damping: int = 1

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().tensor_shapes()
        if self.bridge:
            shapes |= {"bridge.weight": (self.dim, self.dim), "bridge.norm.weight": (self.dim,)}
        return shapes | ({"mixer.weight": (self.dim, 2 * self.dim)} if self.mixer else {})

    def prepared(self, graph: "Graph", prelude: str) -> str:
        """Return the bridge's output, or the mixer's half that reads the prelude."""
        if self.bridge:
            return graph.linear(graph.norm(prelude, "bridge.norm"), "bridge")
        return self._mixed(graph, prelude, half=1) if self.mixer else prelude

    def start(self, graph: "Graph", prelude: str) -> str:
        """Return the prelude's output, or zeros, the mean of the noise."""
        return graph.scaled(prelude, 0.0) if self.start_noise else prelude

    def input(self, graph: "Graph", state: str, prepared: str) -> str:
        """Return the state, mixed with the prelude by a mixer."""
        return (
            graph.add("Add", self._mixed(graph, state, half=0), prepared) if self.mixer else state
        )

    def stepped(self, graph: "Graph", entered: str, passed: str) -> str:
        """Return the state 1/K of the way from the step's input to the layers' output."""
        if self.damping == 1:
            return passed
        way = graph.scaled(graph.add("Sub", passed, entered), 1 / self.damping)
        return graph.add("Add", entered, way)

    def advance(self, graph: "Graph", state: str, prepared: str) -> str:
        """Return the state with the bridge's output."""
        return graph.add("Add", state, prepared) if self.bridge else state

    def _mixed(self, graph: "Graph", x: str, half: int) -> str:
        weight = graph.read("mixer.weight")[:, half * self.dim :][:, : self.dim]
        return graph.add("MatMul", x, graph.matrix(f"mixer.{half}", weight))
