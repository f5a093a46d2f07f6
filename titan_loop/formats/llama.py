"""Folders of `LlamaForCausalLM`, which every engine reads: a dense model, or a layer per visit.

A loop becomes prelude, core × R, coda, without a norm between the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from titan_loop.errors import UserError
from titan_loop.formats.format import Export, Format
from titan_loop.formats.gguf_file import UNROLLED
from titan_loop.formats.llama_shape import LlamaShape, unsupported
from titan_loop.formats.model_folder import engines_of_llama, write_model_folder
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.llama import LLAMA_SIZES, DenseOptions

_MISTRAL = "mistral"


@dataclass(frozen=True, kw_only=True)
class DenseShape(LlamaShape):
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

    def options(self) -> DenseOptions:
        """As in the base class."""
        return DenseOptions(
            **self.shared_options(LLAMA_SIZES, DenseOptions().size),
            norm_eps=self.norm_eps,
            norm_placement=self.norm_placement,
        )


@dataclass(frozen=True, kw_only=True)
class UnrolledShape(DenseShape):
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


def _write(export: Export, output: Path) -> None:
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


LLAMA_FOLDER = Format(
    summary="folder for every engine in which every visit is a layer of Llama",
    shape=UnrolledShape.from_architecture,
    write=_write,
    dtypes=("float32", "bfloat16", "float16"),
    folder=UnrolledShape,
)
