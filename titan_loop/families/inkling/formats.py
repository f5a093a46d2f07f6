"""Folders that transformers 5.24 reads with its own code: `inkling2_loop_text`, and its text part.

The layout is the released one: tensors are called model.llm.…, an expert's gate and up rows take
turns, and the head has as many rows as the embedding, of which those behind the vocabulary are 0. A
folder with vision parts (`inkling2_loop`) is imported without them; they are not put back.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from titan_loop.checkpoint.safetensors_files import SafetensorsFolder
from titan_loop.errors import UserError, listed
from titan_loop.formats.fields import integer, positive, unsupported
from titan_loop.formats.llama_shape import EMBEDDING, HEAD, Card, LlamaShape, Read, Shapes
from titan_loop.formats.model_folder import folder_format
from titan_loop.models.family import build_decoder

logger = logging.getLogger(__name__)

_ROOT = "model.llm."
_WINDOWED, _FULL = "hybrid_sliding", "hybrid"
_W13 = "mlp.experts.w13_weight"
_COUNTS = {
    "bias_extent": ("rel_extent", 1024),
    "bias_width": ("d_rel", 16),
    "block_layers": ("n_layers_per_attn_res_block", 6),
    "dim": ("hidden_size", 2304),
    "embedding_rows": ("vocab_size", 201_024),
    "experts": ("n_routed_experts", 128),
    "far_floor": ("log_scaling_n_floor", 8192),
    "head_dim": ("head_dim", 128),
    "hidden_dim": ("moe_intermediate_size", 1152),
    "max_positions": ("max_position_embeddings", 1 << 20),
    "message_rank": ("loop_gate_rank", 64),
    "n_heads": ("num_attention_heads", 24),
    "n_kv_heads": ("num_key_value_heads", 8),
    "n_layers": ("num_hidden_layers", 24),
    "prelude_layers": ("loop_layer_index_start", 6),
    "recurrent_steps": ("loop_num_passes", 3),
    "taps": ("conv_kernel_size", 4),
    "top_k": ("num_experts_per_tok", 8),
    "vocab_size": ("unpadded_vocab_size", 200_058),
    "window": ("sliding_window_size", 1024),
}
"""Options → fields of config.json, and the released class's defaults: whole numbers."""
_NUMBERS = {
    "bias_clip": ("rel_l2_clip_threshold", 8.0),
    "far_alpha": ("log_scaling_alpha", 0.1),
    "gate_softcap": ("mlp_gate_softcap", 4.0),
    "logit_softcap": ("final_logit_softcapping", 30.0),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "qk_clip": ("qk_l2_clip_threshold", 22.627416997969522),
    "score_scale": ("route_scale", 8.0),
    "up_softcap": ("mlp_up_softcap", 25.0),
}
_ALIASES = {
    "intermediate_size": "moe_intermediate_size",
    "num_local_experts": "n_routed_experts",
    "routed_scaling_factor": "route_scale",
    "sconv_kernel_size": "conv_kernel_size",
    "sliding_window": "sliding_window_size",
    "model_max_length": "max_position_embeddings",
}
_LOOP = {
    "core_start": "loop_layer_index_start",
    "core_end": "loop_layer_index_end",
    "num_passes": "loop_num_passes",
    "gate_rank": "loop_gate_rank",
}
"""Fields of `loop_config`, which go before those at the top level."""
_OF_LAYER = {
    **{
        f"attention.qkv_linear.{n}.": f"attn.{n}_{to}."
        for n, to in {"wq": "du", "wk": "dv", "wv": "dv"}.items()
    },
    "attention.wo.": "attn.wo_ud.",
    "attention.gate.": "attn.gate_attn.",
    "attention.sink.": "attn.attn_sink_proj.",
    "attention.q_clip.": "attn.q_l2_clip.",
    "attention.bias.clip.": "attn.rel_l2_clip.",
    "attention.bias.linear.": "attn.wr_du.",
    "attention.bias.bank": "attn.rel_logits_proj.proj",
    "attention.k_conv.": "attn.k_sconv.",
    "attention.v_conv.": "attn.v_sconv.",
    "attention_norm.": "attn_norm.",
    "attention_conv.": "attn_sconv.",
    **{f"{each}_norm.": f"{each}_input_norm." for each in "qkv"},
    "ffn_norm.": "mlp_norm.",
    "ffn_conv.": "mlp_sconv.",
    "moe.routed_experts.inner_experts.gate_up_EFD": _W13,
    "moe.routed_experts.inner_experts.down_EDF": "mlp.experts.w2_weight",
    "moe.router.gate.": "mlp.gate.",
    "moe.expert_bias_E": "mlp.gate.bias",
    "message_gates.q.": "controllers.attn.",
    "message_gates.k.": "controllers.k.",
    "message_gates.v.": "controllers.v.",
    "message_gates.ffn.": "controllers.mlp.",
}
"""Beginnings of a layer's parameters, in a checkpoint and in the files."""
_OF_MODEL = {
    "tok_embeddings.weight": EMBEDDING,
    "lm_head.weight": HEAD,
    "embed_norm.weight": f"{_ROOT}embed_norm.weight",
    "norm.weight": f"{_ROOT}norm.weight",
    "final_input.query": f"{_ROOT}attn_res.output_query",
    "messages.queries": f"{_ROOT}middle_cycle_cross_pass_queries",
    "messages.kv_queries": f"{_ROOT}middle_cycle_cross_pass_kv_queries",
}
_FILE = {EMBEDDING: f"{_ROOT}embed.weight", HEAD: f"{_ROOT}unembed.weight"}


class _TextParts(SafetensorsFolder):
    """The tensors of a folder that belong to the text model; others are named and left out."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        others = [name for name in self.shapes if not name.startswith(_ROOT)]
        if others:
            logger.warning(f"{folder}: left out {len(others)} tensors: {listed(others, 3)}")
        for name in others:
            del self.shapes[name]


@dataclass(frozen=True, kw_only=True)
class InklingShape(LlamaShape):
    """The text model of the released Inkling-2 loops; attributes are the family's options."""

    title: ClassVar[str] = "Inkling"
    family: ClassVar[str] = "inkling"
    model_type: ClassVar[str] = "inkling2_loop_text"
    steps_field: ClassVar[str | None] = "loop_num_passes"
    lists_ends: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, Any]] = {
        "attention_dropout": 0.0,
        "quantization_config": None,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
    }

    tie_weights: bool = False
    rope_theta: float = 1.0
    head_dim: int
    prelude_layers: int
    coda_layers: int
    block_layers: int
    full_layers: tuple[int, ...]
    window: int
    bias_extent: int
    bias_width: int
    far_floor: int
    far_alpha: float
    qk_clip: float
    bias_clip: float
    taps: int
    message_rank: int
    experts: int
    top_k: int
    score_scale: float
    gate_softcap: float
    up_softcap: float
    logit_softcap: float
    embedding_rows: int

    @classmethod
    def from_architecture(
        cls, architecture: Mapping[str, Any], *, recurrent_steps: int, max_positions: int
    ) -> Self:
        """As in the base class; a record has a list where options have a tuple."""
        # Another family's record, refused below, has none.
        full = tuple(architecture.get("full_layers", ()))
        return super().from_architecture(
            {**architecture, "full_layers": full},
            recurrent_steps=recurrent_steps,
            max_positions=max_positions,
        )

    @classmethod
    def describes(cls, config: Mapping[str, Any]) -> bool:
        """As in the base class; also of a model with vision parts."""
        return config.get("model_type") in (cls.model_type, "inkling2_loop")

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class; missing fields have the released class's defaults."""
        if config.get("quantization_config") is not None:
            raise unsupported("quantization_config", config["quantization_config"], None)
        if config["model_type"] != cls.model_type:
            config = config.get("text_config") or {}
            if not isinstance(config, dict):
                raise UserError(f"config.json: text_config={config!r:.40} must be an object")
        for name, wanted in cls.fixed.items():
            if config.get(name, wanted) not in (wanted, None):
                raise unsupported(name, config[name], wanted)
        for alias, name in _ALIASES.items():
            if config.get(alias) not in (None, config.get(name)):
                raise UserError(f"config.json: {alias} is another name of {name}; call it that")
        loop = config.get("loop_config") or {}
        if not isinstance(loop, dict):
            raise UserError(f"config.json: loop_config={loop!r:.40} must be an object")
        config = {**config, **{_LOOP[name]: loop[name] for name in _LOOP if name in loop}}
        known: dict[str, Any] = {
            option: integer(config, name, default) for option, (name, default) in _COUNTS.items()
        }
        known |= {"far_alpha": 0.0} | {
            option: positive(name, config.get(name, default))
            for option, (name, default) in _NUMBERS.items()
            if option != "far_alpha" or config.get(name) != 0
        }
        for option in ("n_heads", "n_kv_heads", "head_dim"):
            name, default = _COUNTS[option]
            if (found := integer(config, f"swa_{name}", default)) != known[option]:
                raise unsupported(f"swa_{name}", found, known[option])
        n_layers = known["n_layers"]
        end = integer(config, "loop_layer_index_end", 18)
        if not known["prelude_layers"] < end <= n_layers:
            raise UserError(f"config.json: loop_layer_index_end={end} must lie within the layers")
        return known | {
            "coda_layers": n_layers - end,
            "full_layers": cls._full_layers(config.get("layer_types"), n_layers),
        }

    @classmethod
    def _full_layers(cls, kinds: Any, n_layers: int) -> tuple[int, ...]:
        if kinds is None:
            return tuple(layer for layer in range(n_layers) if layer % 6 == 5)
        known = {_WINDOWED, _FULL}
        if not isinstance(kinds, list) or len(kinds) != n_layers or not {*kinds} <= known:
            must = f"must be {n_layers} times {_FULL} or {_WINDOWED}"
            raise UserError(f"config.json: layer_types={kinds!r:.80} {must}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor: shape for tensor, (_, shape) in _tensors(self).items()}

    def parameter_name(self, tensor: str) -> str:
        return _tensors(self)[tensor][0]

    def opened(self, folder: Path) -> SafetensorsFolder:
        """As in the base class, without vision parts."""
        return _TextParts(folder)

    def file_name(self, tensor: str) -> str:
        return _FILE.get(tensor, tensor)

    def file_shape(self, tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As in the base class; the head has as many rows as the embedding."""
        return (self.embedding_rows, self.dim) if tensor == HEAD else shape

    def loaded(self, tensor: str, stored: Tensor) -> Tensor:
        """As in the base class; gate rows before up rows."""
        if tensor == HEAD:
            return stored[: self.vocab_size]
        if not tensor.endswith(_W13):
            return stored
        return stored.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)

    def as_stored(self, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
        names = {self.file_name(tensor): tensor for tensor in shapes}

        def stored(name: str) -> Tensor:
            tensor = names[name]
            found = read(tensor)
            if tensor == HEAD:
                return F.pad(found, (0, 0, 0, self.embedding_rows - self.vocab_size))
            if tensor.endswith(_W13):
                return found.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
            return found

        return {name: self.file_shape(names[name], shapes[names[name]]) for name in names}, stored

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        kinds = [_FULL if n in self.full_layers else _WINDOWED for n in range(self.n_layers)]
        return {
            **{name: getattr(self, option) for option, (name, _) in _COUNTS.items()},
            **{name: getattr(self, option) for option, (name, _) in _NUMBERS.items()},
            "architectures": ["Inkling2LoopForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "initializer_range": 0.02,
            "layer_types": kinds,
            "loop_layer_index_end": self.n_layers - self.coda_layers,
            "model_type": self.model_type,
            "pad_token_id": None,
            "scoring_func": "sigmoid",
            "swa_head_dim": self.head_dim,
            "swa_num_attention_heads": self.n_heads,
            "swa_num_key_value_heads": self.n_kv_heads,
            "torch_dtype": dtype,
            "use_cache": True,
        }

    def card(self, name: str) -> Card:
        looped = self.n_layers - self.prelude_layers - self.coda_layers
        return Card(
            about=f"A looped mixture of {self.experts} experts: {self.n_layers} layers, of which "
            f"{looped} are passed {self.recurrent_steps} times.",
            tags=("looped-language-model", "inkling2_loop"),
        )


@cache
def _tensors(shape: InklingShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return tensor of the format → name and shape of the parameter."""
    model = build_decoder(shape.options(), max_seq_len=1, device="meta")
    return {_tensor(name): (name, tuple(each.shape)) for name, each in model.state_dict().items()}


def _tensor(parameter: str) -> str:
    if parameter in _OF_MODEL:
        return _OF_MODEL[parameter]
    _, index, inner = parameter.split(".", 2)
    if inner == "attention_input.query":  # layer 0 has none
        return f"{_ROOT}attn_res.attn_queries.{int(index) - 1}"
    if inner == "ffn_input.query":
        return f"{_ROOT}attn_res.mlp_queries.{index}"
    begin = max((each for each in _OF_LAYER if inner.startswith(each)), key=len)
    return f"{_ROOT}layers.{index}.{_OF_LAYER[begin]}{inner.removeprefix(begin)}"


INKLING_FOLDER = folder_format(
    "folder in the layout of Inkling-2-Mini, which transformers 5.24 reads", InklingShape
)
