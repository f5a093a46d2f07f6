"""`IQuestLoopCoderForCausalLM`: layers once, a gate for each head, two loops.

MLX, vLLM and SGLang have model files for it, transformers has not: the folder brings a config class
alone, which vLLM and SGLang need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from titan_loop.errors import UserError
from titan_loop.formats.fields import Field, unsupported
from titan_loop.formats.llama_shape import Card, LlamaShape
from titan_loop.formats.model_folder import folder_format

LOOPS = 2
"""Loops that mlx-lm runs; vLLM's file would run more."""
_GATE = "model.gate_projections."

_USE = """\
Programs that run it with code of their own:

    python -m mlx_lm generate --model {name} --prompt "Once upon a time"
    vllm serve {name} --trust-remote-code

| program | tried with | what to know |
|---|---|---|
| MLX | mlx-lm 0.32.2 | It runs none of this folder's code: from Python \
`load("{name}", tokenizer_config={{"trust_remote_code": True}})` does not ask about it. |
| vLLM | 0.32.0, read | The folder's config class is what `--trust-remote-code` is for. |
| SGLang | 0.5.23, read | It drops the gates without a word, so its answers are others. |
| transformers | | It has no code for this model. |

"""


@dataclass(frozen=True, kw_only=True)
class LoopCoderShape(LlamaShape):
    """The format of the released IQuest-LoopCoder models.

    Attributes:
        loop_window: Keys of the second loop that a token sees.
    """

    title: ClassVar[str] = "LoopCoder"
    family: ClassVar[str] = "loopcoder"
    model_type: ClassVar[str] = "iquestloopcoder"
    class_name: ClassVar[str] = "IQuestLoopCoderForCausalLM"
    code: ClassVar[tuple[str, ...]] = ("titan_loop.families.loopcoder.remote_code",)
    auto_map: ClassVar[Mapping[str, str]] = {
        "AutoConfig": "configuration_iquestloopcoder.IQuestLoopCoderConfig"
    }
    steps_field: ClassVar[str | None] = "loop_num"
    own_fields: ClassVar[Mapping[str, Field]] = {"loop_window": Field("loop_window_size", int, 64)}
    fixed: ClassVar[Mapping[str, Any]] = {
        **LlamaShape.fixed,
        "is_causal": True,
        "dual_chunk_attention_config": None,
    }

    loop_window: int

    def checked(self) -> Self:
        """As in the base class; raises `UserError` for other numbers of steps than 2."""
        if self.recurrent_steps != LOOPS:
            raise UserError(
                f"--recurrent-steps={self.recurrent_steps}: programs that read the {self.title} "
                f"format run {LOOPS} loops; export a model that was trained with {LOOPS}"
            )
        return self

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        known = super().read_fields({**config, "loop_num": config.get("loop_num", LOOPS)})
        if known["recurrent_steps"] != LOOPS:
            raise unsupported("loop_num", known["recurrent_steps"], LOOPS)
        return known

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().tensor_shapes()
        for index in range(self.n_layers):
            shapes[f"{_GATE}{index}.weight"] = (self.n_heads, self.dim // self.n_heads)
            shapes[f"{_GATE}{index}.bias"] = (self.n_heads,)
        return shapes

    def parameter_name(self, tensor: str) -> str:
        """As in the base class; a layer's gate is a part of its attention."""
        if not tensor.startswith(_GATE):
            return super().parameter_name(tensor)
        index, kind = tensor.removeprefix(_GATE).split(".")
        return f"layers.{index}.attention.mix.{kind}"

    def card(self, name: str) -> Card:
        return Card(
            about=f"A looped language model: {self.n_layers} Llama blocks, applied twice to every "
            "token. The second time they read the first loop's keys globally, and "
            f"{self.loop_window} of their own.",
            tags=("looped-language-model", "iquestloopcoder", "custom_code"),
            usage=_USE.format(name=name),
        )


LOOPCODER_FOLDER = folder_format(
    "folder for MLX and vLLM, whose own code runs it, in which layers are stored once",
    LoopCoderShape,
)
