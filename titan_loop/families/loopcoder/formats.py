"""`IQuestLoopCoderForCausalLM`: layers once, a gate for each head, two loops.

MLX, vLLM and SGLang have model files for it, transformers has not: the folder brings a config class
alone, which vLLM and SGLang need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from titan_loop.errors import UserError
from titan_loop.families.loopcoder.model import SIZES, LoopCoderOptions
from titan_loop.formats.format import Export, Format
from titan_loop.formats.llama_shape import LlamaShape, integer, unsupported
from titan_loop.formats.model_folder import write_model_folder

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
    steps_field: ClassVar[str | None] = "loop_num"
    fixed: ClassVar[Mapping[str, Any]] = {
        **LlamaShape.fixed,
        "is_causal": True,
        "dual_chunk_attention_config": None,
    }

    loop_window: int

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        """As in the base class; raises `UserError` for other numbers of steps than 2."""
        if recurrent_steps != LOOPS:
            raise UserError(
                f"--recurrent-steps={recurrent_steps}: programs that read the {cls.title} format "
                f"run {LOOPS} loops; export a model that was trained with {LOOPS}"
            )
        return super().from_architecture(
            architecture, recurrent_steps=recurrent_steps, max_positions=max_positions
        )

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class, with the window; both have the released class's defaults."""
        loops = {"loop_num": LOOPS, "loop_window_size": 64}
        config = {**config, **{name: config.get(name, value) for name, value in loops.items()}}
        known = super().read_fields(config)
        if known["recurrent_steps"] != LOOPS:
            raise unsupported("loop_num", known["recurrent_steps"], LOOPS)
        return known | {"loop_window": integer(config, "loop_window_size")}

    def options(self) -> LoopCoderOptions:
        """As in the base class."""
        return LoopCoderOptions(
            **self.shared_options(SIZES, LoopCoderOptions().size),
            norm_eps=self.norm_eps,
            loop_window=self.loop_window,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """As in the base class, with the gates."""
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

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """As in the base class, with the loop."""
        return super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id) | {
            "architectures": ["IQuestLoopCoderForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_iquestloopcoder.IQuestLoopCoderConfig"},
            "loop_num": self.recurrent_steps,
            "loop_window_size": self.loop_window,
        }


def _write(export: Export, output: Path) -> None:
    shape = export.shape
    assert isinstance(shape, LoopCoderShape)
    write_model_folder(
        export,
        output,
        about=f"A looped language model: {shape.n_layers} Llama blocks, applied twice to every "
        f"token. The second time they read the first loop's keys globally, and {shape.loop_window} "
        "of their own.",
        tags=("looped-language-model", "iquestloopcoder", "custom_code"),
        remote_code=("titan_loop.families.loopcoder.remote_code",),
        usage=_USE.format(name=output.name),
    )


LOOPCODER_FOLDER = Format(
    summary="folder for MLX and vLLM, whose own code runs it, in which layers are stored once",
    shape=LoopCoderShape.from_architecture,
    write=_write,
    dtypes=("float32", "bfloat16", "float16"),
    folder=LoopCoderShape,
)
