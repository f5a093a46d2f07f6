"""Folders and files of retrofitted models for engines.

| | holds | read by |
|---|---|---|
| retrofit | layers once; bridge, mixer, damped steps; no adapters | transformers, by its own code |
| retrofit-unrolled | every visit a layer of the dense model, with W + U_s V_s | every engine |

A model with a part that a format cannot hold is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.families.retrofit.onnx_shape import RetrofitOnnxShape
from titan_loop.formats.dense import (
    LLAMA_BLOCK,
    BlockShape,
    UnrolledShape,
    read_block,
)
from titan_loop.formats.fields import Field
from titan_loop.formats.llama_shape import Card, LlamaShape, auto_map
from titan_loop.formats.model_folder import folder_format


@dataclass(frozen=True, kw_only=True)
class RetrofitShape(BlockShape):
    """A dense model's shape with a loop inside, for transformers.

    Attributes:
        bridge: Whether steps after the first read the prelude's output.
        mixer: Whether all steps read the prelude's output, mixed with the state.
        damping: K, the number of damped steps that make up one undamped pass.
    """

    title: ClassVar[str] = "retrofit"
    family: ClassVar[str] = "retrofit"
    model_type: ClassVar[str] = "titan_loop_retrofit"
    class_name: ClassVar[str] = "RetrofitForCausalLM"
    code: ClassVar[tuple[str, ...]] = (
        "titan_loop.families.nanbeige.remote_code",
        "titan_loop.families.retrofit.remote_code",
    )
    auto_map: ClassVar[Mapping[str, str]] = auto_map("retrofit", "Retrofit")
    steps_field: ClassVar[str | None] = "num_loops"
    own_fields: ClassVar[Mapping[str, Field]] = {
        "prelude_layers": Field("prelude_layers", least=0),
        "coda_layers": Field("coda_layers", least=0),
        "bridge": Field("bridge", bool),
        "mixer": Field("mixer", bool),
        "damping": Field("damping"),
    }
    fixed: ClassVar[Mapping[str, Any]] = {**LlamaShape.fixed, "skip_loop_final_norm": True}
    of_model: ClassVar[Mapping[str, str]] = {
        **LlamaShape.of_model,
        "model.bridge.": "bridge.",
        "model.bridge_norm.": "bridge.norm.",
        "model.mixer.": "mixer.",
    }

    prelude_layers: int = 0
    coda_layers: int = 0
    bridge: bool = False
    mixer: bool = False
    start_noise: float = 0.0
    damping: int = 1

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        block = read_block(config.get("block", {}))
        of_block = ("hidden_act", "attention_bias", "mlp_bias", "head_dim")
        llama = {name: value for name, value in config.items() if name not in of_block}
        known = super().read_fields(llama | {"head_dim": None}) | {"block": block}
        # Older exports said only whether there was noise.
        noise = config.get("start_noise", None if config.get("start_at_zero") else 0.0)
        if type(noise) not in (int, float) or not 0 <= noise < float("inf"):
            raise UserError(
                f"config.json: start_noise={noise!r:.40} must be a number of at least 0: the "
                "model.start_noise of the training"
            )
        return known | {"start_noise": float(noise)}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().tensor_shapes()
        if self.bridge:
            shapes["model.bridge.weight"] = (self.dim, self.dim)
            shapes["model.bridge_norm.weight"] = (self.dim,)
        if self.mixer:
            shapes["model.mixer.weight"] = (self.dim, 2 * self.dim)
        return shapes

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        gelu = self.block["activation"] == "gelu"
        unlike = {name: value for name, value in self.block.items() if value != LLAMA_BLOCK[name]}
        return super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id) | {
            "head_dim": self.head_dim,
            "hidden_act": "gelu_pytorch_tanh" if gelu else "silu",
            "mlp_bias": self.block["feed_forward_biases"],
            "block": unlike,
            "skip_loop_final_norm": True,
            "start_at_zero": self.start_noise > 0,
            "start_noise": self.start_noise,
        }

    def card(self, name: str) -> Card:
        core = self.n_layers - self.prelude_layers - self.coda_layers
        return Card(
            about=f"A language model of {self.n_layers} layers, of which {core} are applied "
            f"{self.recurrent_steps} times to every token.",
            tags=("looped-language-model", "custom_code"),
        )


@dataclass(frozen=True, kw_only=True)
class RetrofitUnrolledShape(UnrolledShape):
    """Llama's shape of an unrolled loop with adapters."""

    family: ClassVar[str] = "retrofit"

    adapter_rank: int = 0
    adapter_sets: int = 1
    adapter_first_step: int = 1

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        weight = super().read(reader, tensor)
        chosen = self._adapters_of(tensor)
        if chosen is None or weight.ndim < 2:
            return weight
        stem = self.parameter_name(tensor).removesuffix("weight")
        up, down = (reader.read(f"{stem}{name}")[chosen].double() for name in ("up", "down"))
        return (weight.double() + up @ down).to(weight.dtype)

    def _adapters_of(self, tensor: str) -> int | None:
        """Return the set of a tensor's visit; None outside the loop and where there is none."""
        if not self.adapter_rank or not tensor.startswith("model.layers."):
            return None
        visit = int(tensor.split(".")[2])
        core = max(self.visits) + 1 - self.prelude_layers - self.coda_layers
        if not self.prelude_layers <= visit < len(self.visits) - self.coda_layers:
            return None
        step = (visit - self.prelude_layers) // core + 1
        chosen = min(step - self.adapter_first_step, self.adapter_sets - 1)
        return None if chosen < 0 else chosen


LOOPED = folder_format(
    "folder for transformers; layers are stored once, with bridge, mixer and damping",
    RetrofitShape,
    onnx=RetrofitOnnxShape,
)
UNROLLED = folder_format(
    "folder for every engine in which every visit is a layer of the dense model's class",
    RetrofitUnrolledShape,
    folder=None,
    gguf=RetrofitUnrolledShape,
)
