"""Folders for engines: `NanbeigeForCausalLM`, and `LlamaForCausalLM` with a layer per visit.

| | holds | read by |
|---|---|---|
| nanbeige | whole stack × R, norm between steps or not | SGLang, MLX; vLLM and transformers through the folder's code |
| llama-unrolled | prelude, core × R, coda; no norm between steps | every engine |
"""  # noqa: E501  (a table row is one line)

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from titan_loop.errors import UserError
from titan_loop.families.nanbeige.model import NanbeigeOptions
from titan_loop.formats.format import Export, Format
from titan_loop.formats.gguf_file import UNROLLED
from titan_loop.formats.llama_shape import LlamaShape, unsupported
from titan_loop.formats.model_folder import engines_of_llama, write_model_folder
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.llama import LLAMA_SIZES

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

_MISTRAL = "mistral"


@dataclass(frozen=True, kw_only=True)
class _BlockShape(LlamaShape):
    """The shape of a model of this family.

    Attributes:
        norm_placement: Place of the final norm.
    """

    family: ClassVar[str] = "nanbeige"

    norm_placement: NormPlacement = "readout"

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        """As in the base class; raises `UserError` for an exit gate, too."""
        if architecture.get("exit_gate"):
            raise UserError(
                f"model.exit_gate=True: the {cls.title} format has no place for a gate, and its "
                "engines run all steps; train without one"
            )
        return super().from_architecture(
            architecture, recurrent_steps=recurrent_steps, max_positions=max_positions
        )

    def options(self) -> NanbeigeOptions:
        """As in the base class."""
        return NanbeigeOptions(
            **self.shared_options(LLAMA_SIZES, NanbeigeOptions().size),
            norm_eps=self.norm_eps,
            norm_placement=self.norm_placement,
        )


@dataclass(frozen=True, kw_only=True)
class NanbeigeShape(_BlockShape):
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


@dataclass(frozen=True, kw_only=True)
class UnrolledShape(_BlockShape):
    """Llama: a dense model, or a loop in which every visit becomes a layer of its own.

    Attributes:
        prelude_layers: First layers of the checkpoint, which are not looped.
        coda_layers: Last layers of the checkpoint, which are not looped.
        visits: For each layer of the format, its layer in the checkpoint; empty if they are equal.
    """

    title: ClassVar[str] = "Llama"
    model_type: ClassVar[str] = "llama"
    gguf_architecture: ClassVar[str | None] = UNROLLED
    fixed: ClassVar[Mapping[str, Any]] = {**LlamaShape.fixed, "pretraining_tp": 1}

    prelude_layers: int = 0
    coda_layers: int = 0
    visits: tuple[int, ...] = ()

    @classmethod
    def describes(cls, config: Mapping[str, Any]) -> bool:
        """As in the base class; Mistral's models, too."""
        return super().describes(config) or config.get("model_type") == _MISTRAL

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class; without a sliding window, Mistral computes what Llama does."""
        if config.get("model_type") == _MISTRAL:
            window = config.get("sliding_window", "absent, which means 4096")
            if window is not None:
                raise unsupported("sliding_window", window, None)
            config = {**config, "model_type": cls.model_type}
        return super().read_fields(config)

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        """Return the shape with a layer for every visit.

        Raises:
            UserError: As in the base class; or a norm stands between two visits.
        """
        shape = super().from_architecture(
            architecture, recurrent_steps=recurrent_steps, max_positions=max_positions
        )
        if shape.norm_placement == "every_step" and (recurrent_steps > 1 or shape.coda_layers):
            raise UserError(
                "model.norm_placement=every_step: Llama has no norm between the steps of a loop; "
                "export to nanbeige or gguf"
            )
        layers = range(shape.n_layers)
        stop = shape.n_layers - shape.coda_layers
        core = [*layers[shape.prelude_layers : stop]] * recurrent_steps
        visits = (*layers[: shape.prelude_layers], *core, *layers[stop:])
        return replace(shape, n_layers=len(visits), visits=visits, recurrent_steps=1)

    def stored_layer(self, index: int) -> int:
        """As in the base class."""
        return self.visits[index] if self.visits else index

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """As in the base class."""
        config = super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id)
        return config | {"architectures": ["LlamaForCausalLM"]}


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


def _write_llama(export: Export, output: Path) -> None:
    shape = export.shape
    assert isinstance(shape, UnrolledShape)
    stored = len(set(shape.visits))
    note = f", unrolled from {stored}" if stored < shape.n_layers else ""
    write_model_folder(
        export,
        output,
        about=f"A language model of {shape.n_layers} Llama blocks{note}.",
        tags=("llama",),
        usage=engines_of_llama(output.name, remote_code=False),
    )


NANBEIGE_FOLDER = Format(
    summary="folder for SGLang, MLX, vLLM and transformers in which layers are stored once",
    shape=NanbeigeShape.from_architecture,
    write=_write_nanbeige,
    dtypes=("float32", "bfloat16", "float16"),
    folder=NanbeigeShape,
)
LLAMA_FOLDER = Format(
    summary="folder for every engine in which every visit is a layer of Llama",
    shape=UnrolledShape.from_architecture,
    write=_write_llama,
    dtypes=("float32", "bfloat16", "float16"),
    folder=UnrolledShape,
)
