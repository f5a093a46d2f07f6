"""The shape of a model in Llama's terms, between `config.json` and the options of a family.

An import guesses nothing: it refuses a folder with a field that would change the computation.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from titan_loop.checkpoint.safetensors_files import SafetensorsFolder
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.formats.fields import (
    Field,
    Fields,
    boolean,
    integer,
    positive,
    read_rotations,
    unsupported,
)
from titan_loop.models.family import ModelOptions, completed_architecture, get_family
from titan_loop.models.loop_config import NORM_EPS

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Read: TypeAlias = Callable[[str], Tensor]

_GGUF_OF_MODEL = {EMBEDDING: "token_embd", "model.norm.weight": "output_norm", HEAD: "output"}
_GGUF_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.gate_proj": "attn_gate",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "input_layernorm_2": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_attention_layernorm_2": "post_ffw_norm",
}

# Larger numbers would fill the memory before the tensors contradict them.
_MOST_LAYERS = _MOST_STEPS = 10_000
_MOST_POSITIONS = 1 << 24


class Card(NamedTuple):
    """What the card of a folder says of a model.

    Attributes:
        about: First sentence.
        note: End of the first paragraph.
        mark: Line of the example after the prompt, which it may change.
        usage: Paragraphs about use, after the example.
        warning: What an engine computes otherwise, which the export says, too.
    """

    about: str
    tags: tuple[str, ...]
    note: str = ""
    mark: str = ""
    usage: str = ""
    warning: str | None = None


def auto_map(stem: str, name: str) -> dict[str, str]:
    """Return the classes in a folder's own code, `configuration_STEM.py` and `modeling_STEM.py`."""
    return {
        "AutoConfig": f"configuration_{stem}.{name}Config",
        "AutoModel": f"modeling_{stem}.{name}Model",
        "AutoModelForCausalLM": f"modeling_{stem}.{name}ForCausalLM",
    }


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The properties of a model that determine its tensors and its computation.

    Each format is a subclass that adds fields, tensors and its layout of `config.json`.

    Attributes:
        vocab_size: Rows of embedding and head, V.
        max_positions: Window of the last stage, or the imported folder's.
    """

    title: ClassVar[str]
    """The format's name in messages."""
    family: ClassVar[str]
    """The family whose models it holds."""
    model_type: ClassVar[str]
    """`model_type` of `config.json`."""
    class_name: ClassVar[str] = ""
    """Class in transformers."""
    code: ClassVar[tuple[str, ...]] = ()
    """Packages whose Python files transformers needs beside the weights."""
    auto_map: ClassVar[Mapping[str, str]] = {}
    """Classes in this code, by the class of transformers that loads them."""
    own_fields: ClassVar[Mapping[str, Field]] = {}
    """Options of the family → the fields of `config.json` that hold them."""
    gguf_architecture: ClassVar[str | None] = None
    """`general.architecture` in GGUF; None where llama.cpp has no such model."""
    gguf_programs: ClassVar[str] = "runs in llama.cpp and programs built on it (tried with b11549)"
    """Which programs run a GGUF file of this architecture."""
    gguf_is_released: ClassVar[bool] = True
    """Whether a released llama.cpp loads such a file."""
    gguf_neighbours: ClassVar[bool] = True
    """Whether llama.cpp rotates neighbouring elements of a head instead of its halves."""
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }
    """Fields of `config.json` that must have one value where they are present."""
    steps_field: ClassVar[str | None] = None
    """Field of `config.json` that holds R; None where R is 1."""
    lists_ends: ClassVar[bool] = True
    """Whether `eos_token_id` of `config.json` may be a list; `generation_config.json`'s may."""
    tokenizer_folder: ClassVar[str] = ""
    """Sub-folder with the tokenizer; empty if it lies beside `config.json`."""
    of_model: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "tok_embeddings.",
        "model.norm.": "norm.",
        "lm_head.": "lm_head.",
    }
    of_layer: ClassVar[Mapping[str, str]] = {
        "self_attn.q_proj.": "attention.qkv_linear.wq.",
        "self_attn.k_proj.": "attention.qkv_linear.wk.",
        "self_attn.v_proj.": "attention.qkv_linear.wv.",
        "self_attn.o_proj.": "attention.wo.",
        "mlp.gate_proj.": "feed_forward.w1.",
        "mlp.down_proj.": "feed_forward.w2.",
        "mlp.up_proj.": "feed_forward.w3.",
        "input_layernorm.": "attention_norm.",
        "post_attention_layernorm.": "ffn_norm.",
    }

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    tie_weights: bool
    rope_theta: float
    norm_eps: float = NORM_EPS
    recurrent_steps: int
    max_positions: int

    @property
    def slots(self) -> int:
        """Number of slots of a cache: one for each layer in every recurrent step."""
        return self.n_layers * self.recurrent_steps

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        """Return the shape of a checkpoint's model; `UserError` if the format cannot hold it."""
        architecture = completed_architecture(architecture)
        family = architecture["family"]
        get_family(family).require("export")
        if family != cls.family:
            raise UserError(
                f"model.family={family}: the {cls.title} format holds models of family "
                f"{cls.family} alone; titan-loop convert export RUN --list names the others"
            )
        if recurrent_steps > _MOST_STEPS:
            raise UserError(
                f"--recurrent-steps={recurrent_steps} must be at most {_MOST_STEPS}, as on import"
            )
        usual = completed_architecture({"family": architecture["family"]})
        names = {field.name for field in fields(cls)}
        for name in architecture.keys() - names:
            if architecture[name] != usual.get(name):
                raise UserError(
                    f"model.{name}={architecture[name]}: the {cls.title} format has no place for "
                    f"it; only a model with {usual.get(name)} can be exported"
                )
        shape = {name: architecture[name] for name in names & architecture.keys()}
        return cls(**shape, recurrent_steps=recurrent_steps, max_positions=max_positions).checked()

    def checked(self) -> Self:
        """Return the shape of a checkpoint's model; raise `UserError` if no engine runs it so."""
        return self

    @classmethod
    def describes(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a `config.json` is one of this format."""
        return config.get("model_type") == cls.model_type

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a `config.json`; errors as in `read_fields`."""
        return cls(**cls.read_fields(config))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that a `config.json` gives.

        Raises `UserError` for a field that is missing, of the wrong kind, or changes the
        computation.
        """
        for name, wanted in {"model_type": cls.model_type, **cls.fixed}.items():
            found = config.get(name, wanted if name != "model_type" else None)
            if found != wanted and (found or wanted):
                raise unsupported(name, found, wanted)
        n_layers = integer(config, "num_hidden_layers", most=_MOST_LAYERS)
        n_heads = integer(config, "num_attention_heads")
        dim = integer(config, "hidden_size")
        head_dim = integer(config, "head_dim", dim // n_heads)
        if head_dim * n_heads != dim:
            quotient = f"hidden_size / num_attention_heads = {dim / n_heads:g}"
            raise unsupported("head_dim", head_dim, quotient)
        rope = read_rotations(Fields(config, {}), head_dim, kinds=("default",))
        if "rotary_dim" in rope:
            raise unsupported("partial_rotary_factor", rope["rotary_dim"] / head_dim, 1.0)
        return {
            "dim": dim,
            "n_layers": n_layers,
            "n_heads": n_heads,
            "n_kv_heads": integer(config, "num_key_value_heads", n_heads),
            "hidden_dim": integer(config, "intermediate_size"),
            "vocab_size": integer(config, "vocab_size"),
            "tie_weights": boolean(config, "tie_word_embeddings", False),
            "rope_theta": rope["rope_theta"],
            "norm_eps": positive("rms_norm_eps", config.get("rms_norm_eps", NORM_EPS)),
            "recurrent_steps": 1
            if cls.steps_field is None
            else integer(config, cls.steps_field, most=_MOST_STEPS),
            "max_positions": integer(config, "max_position_embeddings", most=_MOST_POSITIONS),
            **{option: field.read(config) for option, field in cls.own_fields.items()},
        }

    def options(self, family: str | None = None, **more: Any) -> ModelOptions:
        """Return the options that build a model of this shape: all that have its fields' names."""
        known = get_family(family or self.family)
        own = attrgetter("dim", "n_layers", "n_heads", "hidden_dim")
        named = (name for name, size in known.sizes.items() if own(size) == own(self))
        names = {option.name for option in fields(known.options) if option.init}
        same = {name: value for name, value in vars(self).items() if name in names}
        return known.options(size=next(named, known.options().size), **same, **more)

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        """Return the content of `config.json`; the ids are None without a tokenizer."""
        steps = {} if self.steps_field is None else {self.steps_field: self.recurrent_steps}
        return {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "head_dim": self.dim // self.n_heads,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": 0.02,
            "intermediate_size": self.hidden_dim,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": self.model_type,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_weights,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            "architectures": [self.class_name],
            **({"auto_map": dict(self.auto_map)} if self.auto_map else {}),
            **steps,
            **{field.name: getattr(self, option) for option, field in self.own_fields.items()},
        }

    def card(self, name: str) -> Card:
        """Return the card of a folder of this name."""
        raise NotImplementedError

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.dim // self.n_heads

    def gguf_engine(self) -> tuple[str, bool]:
        """Return `general.architecture`, and whether rows of queries and keys are interleaved."""
        assert self.gguf_architecture is not None
        return self.gguf_architecture, self.gguf_neighbours

    def gguf_stored(self, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
        """Return the tensors that a GGUF file is written with, given the format's own."""
        return shapes, read

    def gguf_metadata(self) -> dict[str, Any]:
        """Return GGUF's keys beyond Llama's, without the architecture's name in front."""
        return {}

    def gguf_name(self, tensor: str) -> str | None:
        """Return GGUF's name of a tensor of the format; None for an exit gate's."""
        if tensor in _GGUF_OF_MODEL:
            return f"{_GGUF_OF_MODEL[tensor]}.weight"
        if not tensor.startswith("model.layers."):
            return None
        _, _, index, inner = tensor.split(".", 3)
        stem, kind = inner.rsplit(".", 1)
        return f"blk.{index}.{self.gguf_layer_name(stem)}.{kind}"

    def gguf_layer_name(self, stem: str) -> str:
        """Return GGUF's name of a module of a layer."""
        return _GGUF_OF_LAYER[stem]

    def layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of one layer."""
        kv_dim = self.n_kv_heads * (self.dim // self.n_heads)
        for name, rows in {"q": self.dim, "k": kv_dim, "v": kv_dim}.items():
            yield f"self_attn.{name}_proj.weight", (rows, self.dim)
        yield "self_attn.o_proj.weight", (self.dim, self.dim)
        yield "mlp.gate_proj.weight", (self.hidden_dim, self.dim)
        yield "mlp.up_proj.weight", (self.hidden_dim, self.dim)
        yield "mlp.down_proj.weight", (self.dim, self.hidden_dim)
        yield "input_layernorm.weight", (self.dim,)
        yield "post_attention_layernorm.weight", (self.dim,)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of the format."""
        layer = dict(self.layer_shapes())
        return {
            EMBEDDING: (self.vocab_size, self.dim),
            **{
                f"model.layers.{index}.{name}": shape
                for index in range(self.n_layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (self.dim,),
            HEAD: (self.vocab_size, self.dim),
        }

    def written_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return `tensor_shapes`, without a tied head: engines expect the matrix once."""
        shapes = self.tensor_shapes()
        if self.tie_weights:
            del shapes[HEAD]
        return shapes

    def parameter_count(self) -> int:
        """Return the number of parameters, a tied matrix counted once."""
        return sum(map(prod, self.written_shapes().values()))

    def opened(self, folder: Path) -> SafetensorsFolder:
        """Return the tensors of a folder, by the names of `file_name`."""
        return SafetensorsFolder(folder)

    def as_stored(self, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
        """Return the tensors that a folder is written with, given the format's own."""
        return shapes, read

    def file_name(self, tensor: str) -> str:
        """Return the name of one of the format's tensors in a folder's files."""
        return tensor

    def file_shape(self, tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in a folder's files; `shape` is the tensor's shape in a checkpoint."""
        return shape

    def loaded(self, tensor: str, stored: Tensor) -> Tensor:
        """Convert a tensor of a folder's files to the layout of a checkpoint."""
        return stored

    def zeros(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of tensors that a folder lacks and an import sets to 0."""
        return {}

    def stored_layer(self, index: int) -> int:
        """Return the number in the checkpoint of the format's layer `index`."""
        return index

    def fill(self, tensor: str) -> float | None:
        """Return the constant that fills a tensor that checkpoints lack; None for the others."""
        return None

    def of_layer_name(self, inner: str) -> str:
        """Return a checkpoint's name of a module of a layer; both names end in a dot."""
        return self.of_layer[inner]

    def shape_in(self, reader: CheckpointReader, tensor: str) -> tuple[int, ...]:
        """Return the shape of one of the format's tensors in a checkpoint."""
        return tuple(reader.shape(self.parameter_name(tensor)))

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        """Return a tensor by the format's name, in the checkpoint's dtype."""
        if (fill := self.fill(tensor)) is not None:
            return torch.full(self.tensor_shapes()[tensor], fill)
        return reader.read(self.parameter_name(tensor))

    def parameter_name(self, tensor: str) -> str:
        """Return the name of one of the format's tensors in `LoopDecoder.state_dict`.

        Nothing is transposed or permuted: both keep [out, in] and rotate halves of a head.
        """
        stem, kind = tensor.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, index, inner = f"{stem}.".split(".", 3)
            return f"layers.{self.stored_layer(int(index))}.{self.of_layer_name(inner)}{kind}"
        return f"{self.of_model[f'{stem}.']}{kind}"
