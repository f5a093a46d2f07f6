"""The shape of an Ouro model, between `config.json` and `OuroOptions`.

Nothing of a config is guessed on import: a field that would change what is computed must have the
value that titan_loop computes, or the folder is refused. On export every field is written, because
the defaults of the released configuration class are those of another model.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_loop.errors import UserError
from titan_loop.models.family import FIRST_FAMILY, completed_architecture, get_family
from titan_loop.models.loop_config import NORM_EPS

MODEL_TYPE = "ouro"

# Fields that must have one value if they are there, and why.
_FIXED: Mapping[str, Any] = {
    "model_type": MODEL_TYPE,
    "hidden_act": "silu",
    "rms_norm_eps": NORM_EPS,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}

# A number beyond these would fill the memory before the tensors contradict it, or afterwards if
# none does.
_MOST = {"num_hidden_layers": 10_000, "total_ut_steps": 10_000, "max_position_embeddings": 1 << 24}
_MOST_ROWS = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class OuroShape:
    """Everything about a model that decides which tensors it has and what they compute.

    Attributes:
        dim: Width D.
        n_layers: Unique layers.
        n_heads: Query heads.
        n_kv_heads: Key-value heads; as many as query heads in the released models.
        hidden_dim: Feed-forward width F.
        vocab_size: Rows of embedding and head, V.
        tie_weights: Whether embedding and head are one matrix.
        rope_theta: Base of the rotary embedding.
        recurrent_steps: R.
        max_positions: Window of the last stage, or what an imported folder said.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    tie_weights: bool
    rope_theta: float
    recurrent_steps: int
    max_positions: int

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> "OuroShape":
        """Return the shape of a checkpoint's model.

        Args:
            architecture: Architecture record of the manifest.
            recurrent_steps: R of its last training step.
            max_positions: The window of its last stage.

        Raises:
            UserError: The family is not exported, or the model has an option for which the format
                has no place.
        """
        get_family(str(architecture.get("family", FIRST_FAMILY))).require("export")
        architecture = completed_architecture(architecture)
        shape = {name: architecture[name] for name in architecture if name in cls.__slots__}
        usual = completed_architecture({"family": architecture["family"]})
        for name in architecture.keys() - shape.keys() - {"exit_gate"}:
            if architecture[name] != usual.get(name):
                raise UserError(
                    f"model.{name}={architecture[name]}: the Ouro format has no place for it; only "
                    f"a model with {usual.get(name)} can be exported"
                )
        return cls(**shape, recurrent_steps=recurrent_steps, max_positions=max_positions)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "OuroShape":
        """Read a `config.json`.

        Raises:
            UserError: A field is missing, of the wrong kind, or asks for what titan_loop does not
                compute.
        """
        for name, wanted in _FIXED.items():
            found = config.get(name, wanted if name != "model_type" else None)
            if found != wanted:
                raise _unsupported(name, found, wanted)
        n_layers, n_heads = (
            _integer(config, "num_hidden_layers"),
            _integer(config, "num_attention_heads"),
        )
        layer_types = config.get("layer_types") or ["full_attention"] * n_layers
        if layer_types != ["full_attention"] * n_layers:
            raise _unsupported("layer_types", layer_types, '"full_attention" for every layer')
        dim = _integer(config, "hidden_size")
        head_dim = _integer(config, "head_dim", dim // n_heads)
        if head_dim * n_heads != dim:
            raise _unsupported(
                "head_dim", head_dim, f"hidden_size / num_attention_heads = {dim / n_heads:g}"
            )
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise UserError(f"config.json: tie_word_embeddings={tied!r} must be true or false")
        return cls(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=_integer(config, "num_key_value_heads", n_heads),
            hidden_dim=_integer(config, "intermediate_size"),
            vocab_size=_integer(config, "vocab_size"),
            tie_weights=tied,
            rope_theta=_rope_theta(config),
            recurrent_steps=_integer(config, "total_ut_steps"),
            max_positions=_integer(config, "max_position_embeddings"),
        )

    def to_config(self, *, dtype: str, bos_id: int, eos_id: int) -> dict[str, Any]:
        """Return the content of `config.json`, every field of the format and no other.

        Args:
            dtype: "float32" or "bfloat16".
            bos_id: First token of a document.
            eos_id: Last token of a document, or of a turn.
        """
        return {
            "architectures": ["OuroForCausalLM"],
            "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_ouro.OuroConfig",
                "AutoModel": "modeling_ouro.OuroModel",
                "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
            },
            "bos_token_id": bos_id,
            "early_exit_threshold": 1.0,
            "eos_token_id": eos_id,
            "head_dim": self.dim // self.n_heads,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": 0.02,
            "intermediate_size": self.hidden_dim,
            "layer_types": ["full_attention"] * self.n_layers,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.n_layers,
            "model_type": MODEL_TYPE,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "rms_norm_eps": NORM_EPS,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tie_weights,
            "torch_dtype": dtype,
            "total_ut_steps": self.recurrent_steps,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of the format: 11 a layer and 5 more."""
        kv_dim = self.n_kv_heads * (self.dim // self.n_heads)
        attention = {"q": self.dim, "k": kv_dim, "v": kv_dim}
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.dim)
        }
        for index in range(self.n_layers):
            layer = f"model.layers.{index}."
            for name, rows in attention.items():
                shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, self.dim)
            shapes[f"{layer}self_attn.o_proj.weight"] = (self.dim, self.dim)
            shapes[f"{layer}mlp.gate_proj.weight"] = (self.hidden_dim, self.dim)
            shapes[f"{layer}mlp.up_proj.weight"] = (self.hidden_dim, self.dim)
            shapes[f"{layer}mlp.down_proj.weight"] = (self.dim, self.hidden_dim)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}{norm}.weight"] = (self.dim,)
                shapes[f"{layer}{norm}_2.weight"] = (self.dim,)
        return shapes | {
            "model.norm.weight": (self.dim,),
            "model.early_exit_gate.weight": (1, self.dim),
            "model.early_exit_gate.bias": (1,),
            "lm_head.weight": (self.vocab_size, self.dim),
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters: `tensor_shapes` with a tied matrix listed once."""
        shapes = self.tensor_shapes()
        if self.tie_weights:
            del shapes["lm_head.weight"]
        return shapes


_OF_MODEL = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "model.early_exit_gate.": "exit_gate.",
    "lm_head.": "lm_head.",
}
_OF_LAYER = {
    "self_attn.q_proj.": "attention.qkv_linear.wq.",
    "self_attn.k_proj.": "attention.qkv_linear.wk.",
    "self_attn.v_proj.": "attention.qkv_linear.wv.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.up_proj.": "feed_forward.w3.",
    "input_layernorm.": "attention_norm.",
    "input_layernorm_2.": "attention_post_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "post_attention_layernorm_2.": "ffn_post_norm.",
}


def parameter_name(tensor: str) -> str:
    """Return what `LoopDecoder.state_dict` calls a tensor of the format.

    Nothing is transposed or permuted: both keep [out, in] and rotate halves of a head.
    """
    stem, kind = tensor.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, inner = f"{stem}.".split(".", 3)
        return f"layers.{index}.{_OF_LAYER[inner]}{kind}"
    return f"{_OF_MODEL[f'{stem}.']}{kind}"


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base: beside the other fields, or inside `rope_parameters` (transformers 5)."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = config.get(name)
        if part is not None and not isinstance(part, dict):
            raise UserError(f"config.json: {name}={part!r} must be an object or null")
        rope |= part or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    for name, value, wanted in (
        ("rope_type", kind, "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
    ):
        if value != wanted:
            raise _unsupported(name, value, wanted)
    found = {
        _positive("rope_theta", value)
        for value in (config.get("rope_theta"), rope.get("rope_theta"))
        if value is not None
    }
    if len(found) != 1:
        raise UserError(
            "config.json: rope_theta is missing; say which base the model was trained with"
            if not found
            else f"config.json: rope_theta and rope_parameters disagree ({sorted(found)}); keep one"
        )
    return found.pop()


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {name}={value!r:.40} must be a positive number")
    return float(value)


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    most = _MOST.get(name, _MOST_ROWS)
    if type(value) is not int or value < 1:
        raise UserError(f"config.json: {name}={value!r:.40} must be a positive integer")
    if value > most:
        raise UserError(f"config.json: {name}={value!r:.40} must be at most {most}")
    return value


def _unsupported(name: str, found: Any, wanted: Any) -> UserError:
    return UserError(
        f"config.json: {name}={found!r:.80} is not what titan_loop computes; only {wanted!r:.80} "
        "can be imported"
    )
