"""Folders for transformers 5's own `HrmTextForCausalLM`, and the same model as GGUF for llama.cpp.

    config.json: H_cycles, L_cycles, num_layers_per_stack, embedding_scale, prefix_lm
    GGUF: hrm.h_cycles, hrm.l_cycles, hrm.layers_per_stack, hrm.prefix_lm, embedding_scale

Where other formats have the number of layers, both have the number of cache slots: one for each
layer in every pass. llama.cpp keeps `hrm.prefix_lm` but reads prompts causally (release b11549).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titan_loop.checkpoint.safetensors_files import SafetensorsFolder
from titan_loop.errors import UserError
from titan_loop.formats.fields import Field, integer, unsupported
from titan_loop.formats.fused import FusedFolder, fuse
from titan_loop.formats.llama_shape import EMBEDDING, HEAD, Card, LlamaShape, Read, Shapes
from titan_loop.formats.model_folder import folder_format

_START = "model.z_L_init"
_FUSED = {
    ".attn.gqkv_proj.": tuple(f".self_attn.{each}_proj." for each in ("gate", "q", "k", "v")),
    ".attn.o_proj.": (".self_attn.o_proj.",),
    ".mlp.gate_up_proj.": (".mlp.gate_proj.", ".mlp.up_proj."),
}
"""Tensors of the released layout → the matrices in their rows."""
_BOTH_WAYS = (
    "With `prefix_lm`, tokens whose `token_type_ids` are 1 see each other both ways. In a chat of "
    "several turns mark those before the first answer alone, as in training. vLLM 0.32 reads the "
    "whole prompt so; llama.cpp reads it causally.\n\n"
)
_ONE_WAY = (
    "This model was trained without `prefix_lm`. vLLM 0.32 ignores that and reads prompts both "
    "ways, so its answers differ; transformers and llama.cpp are right.\n\n"
)
_MARK = '\n    prompt["token_type_ids"] = prompt["attention_mask"]  # its tokens see each other'
_STACK = re.compile(r"model\.([LH])_module\.layers\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class HrmTextShape(LlamaShape):
    """A model of two stacks; `n_layers` counts the layers of both."""

    title: ClassVar[str] = "HRM-Text"
    family: ClassVar[str] = "hrm_text"
    model_type: ClassVar[str] = "hrm_text"
    gguf_architecture: ClassVar[str | None] = "hrm_text"
    gguf_neighbours: ClassVar[bool] = False
    class_name: ClassVar[str] = "HrmTextForCausalLM"
    steps_field: ClassVar[str | None] = "H_cycles"
    own_fields: ClassVar[Mapping[str, Field]] = {
        "low_cycles": Field("L_cycles"),
        "embedding_scale": Field("embedding_scale", float),
        "prefix_lm": Field("prefix_lm", bool, True),
    }
    of_layer: ClassVar[Mapping[str, str]] = {
        **LlamaShape.of_layer,
        "self_attn.gate_proj.": "attention.gate.",
    }

    low_cycles: int
    embedding_scale: float
    prefix_lm: bool

    @property
    def slots(self) -> int:
        """As in the base class: one for each layer in every pass of its stack."""
        return self.recurrent_steps * (self.low_cycles + 1) * self.n_layers // 2

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class; also refuses a number of layers that contradicts the cycles."""
        known = super().read_fields(config)
        if known["n_kv_heads"] != known["n_heads"]:
            raise unsupported("num_key_value_heads", known["n_kv_heads"], known["n_heads"])
        low_cycles, layers = known["low_cycles"], known["n_layers"]
        # num_hidden_layers: layers of a stack in a config written by hand, which lacks
        # num_layers_per_stack; slots of the cache in one that transformers saved.
        stack = integer(config, "num_layers_per_stack", layers)
        known["n_layers"] = 2 * stack
        slots = stack * known["recurrent_steps"] * (low_cycles + 1)
        if "num_layers_per_stack" in config and layers != slots:
            raise UserError(
                f"config.json: num_hidden_layers={layers} is a cache of other cycles: H_cycles="
                f"{known['recurrent_steps']}, L_cycles={low_cycles} and num_layers_per_stack="
                f"{stack} need {slots}"
            )
        return known

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """As in the base class; `L_bp_cycles` gives L gradients in the last high cycle only."""
        inherited = super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id)
        del inherited["num_key_value_heads"]
        return inherited | {
            "L_bp_cycles": [0] * (self.recurrent_steps - 1) + [self.low_cycles],
            "num_hidden_layers": self.slots,
            "num_layers_per_stack": self.n_layers // 2,
        }

    def gguf_metadata(self) -> dict[str, Any]:
        return {
            "block_count": self.slots,
            "embedding_scale": self.embedding_scale,
            "hrm.h_cycles": self.recurrent_steps,
            "hrm.l_cycles": self.low_cycles,
            "hrm.layers_per_stack": self.n_layers // 2,
            "hrm.prefix_lm": self.prefix_lm,
        }

    def gguf_name(self, tensor: str) -> str | None:
        """As in the base class; the low stack comes first."""
        return "hrm.z_l_init" if tensor == _START else super().gguf_name(self._canonical(tensor))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """As in the base class, without norms, which have no gain; with gates and l_0."""
        gate = {"self_attn.gate_proj.weight": (self.dim, self.dim)}
        matrices = {name: shape for name, shape in self.layer_shapes() if len(shape) > 1} | gate
        return {
            EMBEDDING: (self.vocab_size, self.dim),
            _START: (self.dim,),
            **{
                f"model.{stack}_module.layers.{index}.{name}": shape
                for stack in "LH"
                for index in range(self.n_layers // 2)
                for name, shape in matrices.items()
            },
            HEAD: (self.vocab_size, self.dim),
        }

    def opened(self, folder: Path) -> SafetensorsFolder:
        return FusedFolder(folder, _FUSED, self.tensor_shapes())

    def as_stored(self, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
        """As in the base class, with several matrices of a layer one below another in a tensor."""
        return fuse(shapes, read, _FUSED)

    def parameter_name(self, tensor: str) -> str:
        if tensor == _START:
            return "low_start.weight"
        return super().parameter_name(self._canonical(tensor))

    def _canonical(self, tensor: str) -> str:
        """Return a tensor's name as if both stacks were one, in which H follows L."""
        return _STACK.sub(
            lambda found: f"model.layers.{int(found[2]) + (found[1] == 'H') * self.n_layers // 2}",
            tensor,
        )

    def card(self, name: str) -> Card:
        return Card(
            about="HRM-Text: two stacks of layers that take turns.",
            tags=("looped-language-model", "hrm_text"),
            mark=_MARK if self.prefix_lm else "",
            usage=_BOTH_WAYS if self.prefix_lm else _ONE_WAY,
        )


HRM_TEXT_FOLDER = folder_format(
    "folder in the layout of HRM-Text-1B, which transformers 5 reads with code of its own",
    HrmTextShape,
)
