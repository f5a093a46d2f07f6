"""Folders of dense models for every engine: the model itself, or a layer for each visit of a loop.

A loop becomes prelude, core × R, coda, without a norm between the steps, in the class of the dense
model whose blocks it has: the first in `model_types.py` that can say its options.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from titan_loop.checkpoint.safetensors_files import SafetensorsFolder
from titan_loop.errors import UserError
from titan_loop.formats import gguf_dense, mlx_dense
from titan_loop.formats.fields import Options
from titan_loop.formats.fused import FusedFolder, fuse
from titan_loop.formats.gguf_file import UNROLLED
from titan_loop.formats.llama_shape import EMBEDDING, HEAD, Card, LlamaShape, Read, Shapes
from titan_loop.formats.model_folder import engines_of_llama, folder_format
from titan_loop.formats.model_type import UnsaidError
from titan_loop.formats.model_types import MODEL_TYPES
from titan_loop.models.dense import BlockOptions
from titan_loop.models.family import ModelOptions, completed_architecture
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.llama import LlamaOptions

_OF_LLAMA = {option.name for option in fields(LlamaOptions)}
LLAMA_BLOCK: Mapping[str, Any] = {
    option.name: option.default for option in fields(BlockOptions) if option.name not in _OF_LLAMA
} | {"windowed_layers": ()}
"""Llama's values of the options in which dense models' blocks differ."""

NORMS = {
    "before": {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    "after": {
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
}
"""By order of the norms, their names in the files and in a checkpoint."""

_FUSES = "phi3"
_FUSED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}
"""Tensors of the model type that fuses → the matrices in their rows."""


_GGUF = {
    "attention_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
"""Norms of a checkpoint and modules of files → GGUF's names."""
_FREQUENCIES = "rope_freqs.weight"


def read_block(block: Any) -> dict[str, Any]:
    """Return the options of `LLAMA_BLOCK` that a config.json of ours names, and Llama's others."""
    if not isinstance(block, dict):
        raise UserError(f"config.json: block={block!r:.40} must be an object")
    for name, value in block.items():
        if name not in LLAMA_BLOCK:
            raise UserError(f"config.json: block.{name}={value!r:.40} is unknown to this version")
    lists = {name: tuple(value) for name, value in block.items() if isinstance(value, list)}
    return {**LLAMA_BLOCK, **block, **lists}


@dataclass(frozen=True, kw_only=True)
class DenseShape(LlamaShape):
    """The shape of a model of Llama's blocks."""

    family: ClassVar[str] = "nanbeige"

    norm_placement: NormPlacement = "readout"


@dataclass(frozen=True, kw_only=True)
class BlockShape(LlamaShape):
    """The shape of a model of any dense model's blocks; a mix-in.

    Attributes:
        block: The options of `LLAMA_BLOCK`.
    """

    block: Mapping[str, Any] = field(default_factory=lambda: {**LLAMA_BLOCK})

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        whole = completed_architecture(architecture)
        block = {name: whole[name] for name in LLAMA_BLOCK if name in whole}
        plain = completed_architecture({"family": whole["family"]})
        usual = {name: plain[name] for name in block}
        lists = {name: tuple(value) for name, value in block.items() if isinstance(value, list)}
        return super().from_architecture(
            {**architecture, **usual, "block": {**LLAMA_BLOCK, **block, **lists}},
            recurrent_steps=recurrent_steps,
            max_positions=max_positions,
        )

    def options(self, family: str | None = None, **more: Any) -> ModelOptions:
        return super().options(family, **self.block, **more)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.block["head_dim"] or self.dim // self.n_heads

    @property
    def rotary_dim(self) -> int:
        return self.block["rotary_dim"] or self.head_dim

    def block_options(self) -> Options:
        """Return the options of shape and block that a `ModelType` writes."""
        return {**vars(self), **self.block}

    def layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        biases = {"none": "", "qkv": "qkv", "qkvo": "qkvo"}[self.block["attention_biases"]]
        rows = {"q": queries, "k": keys, "v": keys, "o": self.dim}
        for name, size in rows.items():
            columns = queries if name == "o" else self.dim
            yield f"self_attn.{name}_proj.weight", (size, columns)
            if name in biases:
                yield f"self_attn.{name}_proj.bias", (size,)
        if (norm := self.block["qk_norm"]) != "none":
            for name in "qk":
                size = self.head_dim if norm == "head" else rows[name]
                yield f"self_attn.{name}_norm.weight", (size,)
        for name in ("gate", "up", "down"):
            size = (self.hidden_dim, self.dim)
            size = size[::-1] if name == "down" else size
            yield f"mlp.{name}_proj.weight", size
            if self.block["feed_forward_biases"]:
                yield f"mlp.{name}_proj.bias", size[:1]
        for name in NORMS[self.block["norm_order"]]:
            yield f"{name}.weight", (self.dim,)

    def of_layer_name(self, inner: str) -> str:
        """As in the base class; the norms' names depend on their order."""
        stem = inner.removesuffix(".")
        if stem in NORMS[self.block["norm_order"]]:
            return f"{NORMS[self.block['norm_order']][stem]}."
        if stem in ("self_attn.q_norm", "self_attn.k_norm"):
            return f"attention.{stem[-6:]}."
        return super().of_layer_name(inner)


@dataclass(frozen=True, kw_only=True)
class UnrolledShape(BlockShape, DenseShape):
    """A dense model, or a loop in which every visit becomes a layer of its own.

    Attributes:
        visits: For each layer of the format, its layer in the checkpoint; empty if they are equal.
        kind: Its `model_type`.
    """

    title: ClassVar[str] = "unrolled"
    gguf_architecture: ClassVar[str | None] = UNROLLED
    # transformers' class decides, where a model is imported.
    model_type: ClassVar[str] = "llama"
    normed_fix: ClassVar[str] = "export to nanbeige or gguf"

    prelude_layers: int = 0
    coda_layers: int = 0
    visits: tuple[int, ...] = ()
    kind: str = "llama"

    @classmethod
    def describes(cls, config: Mapping[str, Any]) -> bool:
        """As in the base class; every dense model."""
        return config.get("model_type") in MODEL_TYPES

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        kind = config["model_type"]
        options = MODEL_TYPES[kind].read(config)
        block = {name: options.pop(name) for name in LLAMA_BLOCK if name in options}
        return cls(**options, block={**LLAMA_BLOCK, **block}, recurrent_steps=1, kind=kind)

    def checked(self) -> Self:
        """Return the shape with a layer for every visit; `UserError` if no dense model has it."""
        normed = self.norm_placement == "every_step"
        if normed and (self.recurrent_steps > 1 or self.coda_layers):
            raise UserError(
                f"model.norm_placement=every_step: the {self.title} format has no norm between the "
                f"steps of a loop, or before a coda; {self.normed_fix}"
            )
        layers = range(self.n_layers)
        stop = self.n_layers - self.coda_layers
        core = [*layers[self.prelude_layers : stop]] * self.recurrent_steps
        visits = (*layers[: self.prelude_layers], *core, *layers[stop:])
        block = {**self.block}
        for name in ("windowed_layers", "unrotated_layers"):
            block[name] = tuple(n for n, layer in enumerate(visits) if layer in self.block[name])
        shape = replace(self, n_layers=len(visits), visits=visits, recurrent_steps=1, block=block)
        return replace(shape, kind=_kind(shape))

    def stored_layer(self, index: int) -> int:
        return self.visits[index] if self.visits else index

    def opened(self, folder: Path) -> SafetensorsFolder:
        if self.kind != _FUSES:
            return super().opened(folder)
        return FusedFolder(folder, _FUSED, self.tensor_shapes())

    def as_stored(self, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
        return fuse(shapes, read, _FUSED) if self.kind == _FUSES else (shapes, read)

    def gguf_engine(self) -> tuple[str, bool]:
        engine = gguf_dense.ENGINES[self.kind]
        return engine.architecture, engine.neighbours

    def gguf_metadata(self) -> dict[str, Any]:
        """As in the base class; raises `UserError` if llama.cpp computes the model otherwise."""
        return gguf_dense.keys(self.kind, self.block_options())

    def gguf_name(self, tensor: str) -> str | None:
        return tensor if tensor == _FREQUENCIES else super().gguf_name(tensor)

    def gguf_layer_name(self, stem: str) -> str:
        """As in the base class; the norms' names depend on their order."""
        own = NORMS[self.block["norm_order"]].get(stem, stem)
        return _GGUF[own] if own in _GGUF else super().gguf_layer_name(stem)

    def gguf_stored(self, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
        """As in the base class, with gains 1 + w, fused matrices, and divisors of rotations."""
        shapes, stored = self.as_stored(shapes, read)
        if self.gguf_engine()[0] == "olmo2":  # which loads no tied head
            shapes = {**shapes, HEAD: shapes[EMBEDDING]}
        factors = gguf_dense.frequency_factors(self.block_options())
        if factors is not None:
            shapes = {**shapes, _FREQUENCIES: (len(factors),)}

        def of_engine(name: str) -> Tensor:
            if name == _FREQUENCIES:
                assert factors is not None
                return factors
            is_gain = name.endswith("norm.weight")
            return stored(name) + (is_gain and self.block["norm_offset"])

        return shapes, of_engine

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        config = super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id)
        model_type = MODEL_TYPES[self.kind]
        del config["hidden_act"]
        own = {"model_type": self.kind, "architectures": [model_type.architecture]}
        own["pad_token_id"] = None  # some classes' own is not a row of every embedding
        return config | own | model_type.write(self.block_options(), LLAMA_BLOCK)

    def card(self, name: str) -> Card:
        stored = len(set(self.visits))
        note = f", unrolled from {stored}" if stored < self.n_layers else ""
        kind = MODEL_TYPES[self.kind].architecture.removesuffix("ForCausalLM")
        mlx = mlx_dense.otherwise(self.to_config(dtype="float32", bos_id=None, eos_id=None))
        return Card(
            about=f"A language model of {self.n_layers} {kind} blocks{note}.",
            tags=(self.kind,),
            usage=engines_of_llama(name, remote_code=False, mlx=mlx),
            warning=mlx,
        )


def _kind(shape: UnrolledShape) -> str:
    """Return the first `model_type` that can say a model's options."""
    options = shape.block_options()
    for name, model_type in MODEL_TYPES.items():
        try:
            model_type.write(options, LLAMA_BLOCK)
        except UnsaidError:
            continue
        return name
    own = (f"{name}={shape.block[name]}" for name in LLAMA_BLOCK)
    unusual = [
        text
        for text, name in zip(own, LLAMA_BLOCK, strict=True)
        if shape.block[name] != LLAMA_BLOCK[name]
    ]
    raise UserError(
        f"model.{', model.'.join(unusual)}: no dense model of transformers has such layers "
        f"({', '.join(MODEL_TYPES)}); export to retrofit"
    )


LLAMA_FOLDER = folder_format(
    "folder for every engine in which every visit is a layer of Llama, Qwen3, Gemma 3, …",
    UnrolledShape,
)
