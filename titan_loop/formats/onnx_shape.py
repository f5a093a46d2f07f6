"""The contents of an ONNX file: loops of dense models' blocks, with or without an exit gate.

A family whose steps have parts of their own has a subclass in its folder, which says them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titan_loop.formats.dense import BlockShape
from titan_loop.formats.llama_shape import LlamaShape
from titan_loop.models.dense import DenseOptions, rotations
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.rotary import Rotation

if TYPE_CHECKING:
    from titan_loop.formats.onnx_graph import Graph

GATE = "exit_gate"


@dataclass(frozen=True, kw_only=True)
class OnnxShape(BlockShape):
    """A loop of dense models' blocks.

    Attributes:
        branch_factor: Factor on everything that a looped layer adds to the state.
    """

    title: ClassVar[str] = "onnx"
    family: ClassVar[str] = "nanbeige"
    of_model: ClassVar[Mapping[str, str]] = {**LlamaShape.of_model, f"{GATE}.": f"{GATE}."}

    prelude_layers: int = 0
    coda_layers: int = 0
    norm_placement: NormPlacement = "readout"
    exit_gate: bool = False
    branch_scale: float = 0.0
    branch_factor: float = 1.0
    scale_embeddings: bool = False

    @property
    def looped(self) -> range:
        """Layers that every step applies."""
        return range(self.prelude_layers, self.n_layers - self.coda_layers)

    @property
    def outside(self) -> tuple[range, range]:
        """Layers before and after the loop."""
        return range(self.prelude_layers), range(self.looped.stop, self.n_layers)

    def layer_factor(self, index: int) -> float:
        """Return the factor on both branches of a layer."""
        own = self.branch_factor if index in self.looped else 1.0
        return own * self.block["residual_multiplier"]

    def rotations(self) -> tuple[Rotation, ...]:
        """Return the rotations of layers with all keys, and of layers with a window if others."""
        return rotations(DenseOptions(rope_theta=self.rope_theta, **self.block), self.head_dim)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        gate = {f"{GATE}.weight": (1, self.dim), f"{GATE}.bias": (1,)} if self.exit_gate else {}
        return super().tensor_shapes() | gate

    def to_json(self) -> dict[str, Any]:
        """Return the content of `config.json`: what a program needs beside the file."""
        return {
            "model_type": "titan_loop_onnx",
            "recurrent_steps": self.recurrent_steps,
            "exit_gate": self.exit_gate,
            "slots_outside": sum(map(len, self.outside)),
            "slots_per_step": len(self.looped),
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
        }

    def prepared(self, graph: "Graph", prelude: str) -> str:
        """Return what every step reads of the prelude's output, (1, L, D), here that itself."""
        return prelude

    def start(self, graph: "Graph", prelude: str) -> str:
        """Return the state before step 1."""
        return prelude

    def input(self, graph: "Graph", state: str, prepared: str) -> str:
        """Return a step's first input."""
        return state

    def stepped(self, graph: "Graph", entered: str, passed: str) -> str:
        """Return the state after a step, given its input and the output of layers and norm."""
        return passed

    def advance(self, graph: "Graph", state: str, prepared: str) -> str:
        """Return the state from which the next step starts."""
        return state
