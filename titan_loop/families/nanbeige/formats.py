"""`NanbeigeForCausalLM`: the whole stack × R, with or without a norm between steps.

SGLang and MLX run it, vLLM and transformers through the folder's code, llama.cpp from a GGUF.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titan_loop.errors import UserError
from titan_loop.formats.dense import DenseShape
from titan_loop.formats.format import Export, Format
from titan_loop.formats.llama_shape import unsupported
from titan_loop.formats.model_folder import engines_of_llama, write_model_folder
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
    steps_field: ClassVar[str | None] = "num_loops"

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class, with the norm between steps; refuses all other extensions."""
        for name in _OFF:
            if config.get(name):
                raise unsupported(name, config[name], False)
        if config.get("emb_neighbor_num") is not None:
            raise unsupported("emb_neighbor_num", config["emb_neighbor_num"], None)
        skips = config.get("skip_loop_final_norm", False)
        if not isinstance(skips, bool):
            raise UserError(f"config.json: skip_loop_final_norm={skips!r} must be true or false")
        # MLX and the released code count these instead of num_loops, if there are any.
        weights = config.get("loop_loss_weights") or []
        if weights and (type(weights) is not list or len(weights) + 1 != config.get("num_loops")):
            raise UserError(
                f"config.json: loop_loss_weights={weights!r:.80} contradicts num_loops="
                f"{config.get('num_loops')!r:.40}: engines run a loop more than there are weights; "
                "leave it out if num_loops is right"
            )
        placement = "readout" if skips else "every_step"
        return super().read_fields(config) | {"norm_placement": placement}

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """As in the base class, with the loop."""
        return super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id) | {
            "architectures": ["NanbeigeForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_nanbeige.NanbeigeConfig",
                "AutoModel": "modeling_nanbeige.NanbeigeModel",
                "AutoModelForCausalLM": "modeling_nanbeige.NanbeigeForCausalLM",
            },
            **self.gguf_metadata(),
        }

    def gguf_metadata(self) -> dict[str, Any]:
        """Return the loop's fields, which have the same names in config.json and GGUF."""
        return {
            "num_loops": self.recurrent_steps,
            "skip_loop_final_norm": self.norm_placement == "readout",
        }


def _write_nanbeige(export: Export, output: Path) -> None:
    shape = export.shape
    between = "" if export.shape.gguf_metadata()["skip_loop_final_norm"] else ", each with the norm"
    write_model_folder(
        export,
        output,
        about=f"A looped language model: {shape.n_layers} Llama blocks, applied "
        f"{shape.recurrent_steps} times to every token{between}.",
        tags=("looped-language-model", "nanbeige", "custom_code"),
        remote_code=("titan_loop.families.nanbeige.remote_code",),
        usage=engines_of_llama(output.name, remote_code=True),
    )


NANBEIGE_FOLDER = Format(
    summary="folder for SGLang, MLX, vLLM and transformers in which layers are stored once",
    shape=NanbeigeShape.from_architecture,
    write=_write_nanbeige,
    dtypes=("float32", "bfloat16", "float16"),
    folder=NanbeigeShape,
    onnx=OnnxShape,
)
