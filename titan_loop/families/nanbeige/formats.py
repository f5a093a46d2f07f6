"""`NanbeigeForCausalLM`: the whole stack × R, with or without a norm between steps.

SGLang and MLX run it, vLLM and transformers through the folder's code, llama.cpp from a GGUF.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_loop.errors import UserError
from titan_loop.formats.dense import DenseShape
from titan_loop.formats.fields import boolean
from titan_loop.formats.llama_shape import Card, LlamaShape, auto_map
from titan_loop.formats.model_folder import engines_of_llama, folder_format
from titan_loop.formats.onnx_shape import OnnxShape

# Fields of the released config class that change the computation, and are off in released models.
_OFF = (
    "qk_layernorm",
    "enable_double_loop_split",
    "loop_middle_layers",
    "loop_share_kv",
    "enable_hyper_connection",
    "enable_mhc",
    "enable_depth_attention",
)


@dataclass(frozen=True, kw_only=True)
class NanbeigeShape(DenseShape):
    """The format of the released Nanbeige models: layers once, and the number of loops."""

    title: ClassVar[str] = "Nanbeige"
    model_type: ClassVar[str] = "nanbeige"
    gguf_architecture: ClassVar[str | None] = "nanbeige"
    class_name: ClassVar[str] = "NanbeigeForCausalLM"
    code: ClassVar[tuple[str, ...]] = ("titan_loop.families.nanbeige.remote_code",)
    auto_map: ClassVar[Mapping[str, str]] = auto_map("nanbeige", "Nanbeige")
    steps_field: ClassVar[str | None] = "num_loops"
    fixed: ClassVar[Mapping[str, Any]] = {
        **LlamaShape.fixed,
        **dict.fromkeys(_OFF, False),
        "emb_neighbor_num": None,
    }

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class, with the norm between steps; refuses all other extensions."""
        # MLX and the released code count these instead of num_loops, if there are any.
        weights = config.get("loop_loss_weights") or []
        if weights and (type(weights) is not list or len(weights) + 1 != config.get("num_loops")):
            raise UserError(
                f"config.json: loop_loss_weights={weights!r:.80} contradicts num_loops="
                f"{config.get('num_loops')!r:.40}: engines run a loop more than there are weights; "
                "leave it out if num_loops is right"
            )
        skips = boolean(config, "skip_loop_final_norm", False)
        placement = "readout" if skips else "every_step"
        return super().read_fields(config) | {"norm_placement": placement}

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        return super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id) | self.gguf_metadata()

    def gguf_metadata(self) -> dict[str, Any]:
        """Return the loop's fields, which have the same names in config.json and GGUF."""
        return {
            "num_loops": self.recurrent_steps,
            "skip_loop_final_norm": self.norm_placement == "readout",
        }

    def card(self, name: str) -> Card:
        between = ", each with the norm" if self.norm_placement == "every_step" else ""
        return Card(
            about=f"A looped language model: {self.n_layers} Llama blocks, applied "
            f"{self.recurrent_steps} times to every token{between}.",
            tags=("looped-language-model", "nanbeige", "custom_code"),
            usage=engines_of_llama(name, remote_code=True),
        )


NANBEIGE_FOLDER = folder_format(
    "folder for SGLang, MLX, vLLM and transformers in which layers are stored once",
    NanbeigeShape,
    onnx=OnnxShape,
)
