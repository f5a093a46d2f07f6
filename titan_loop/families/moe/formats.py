"""Folders for transformers with a layer for every visit: R steps give P + R·C + K layers.

| | `mixtral-unrolled` | `glm4_moe-unrolled` | `ernie4_5_moe-unrolled` |
|---|---|---|---|
| scores | softmax | sigmoid | softmax |
| divided by their sum | yes | yes or no | yes |
| factor c | 1 | any | 1 |
| bias b on the choice of experts | 0 | any | any |
| shared experts | none | any number | any number |
| dense layers | none | the first visits | the first and the last visits |
| rotation of a head | halves | halves | neighbours |

P, C and K count prelude, looped and coda layers. Every visit has the router, bias and attention of
its step. GLM's class always has a shared expert: a model without one gets one of zeros. Ernie
rotates neighbours, so the rows of its queries and keys are reordered. An expert is a slice of a
checkpoint's stack of matrices: one stack is in memory at a time.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.formats.dense import UnrolledShape
from titan_loop.formats.format import Export
from titan_loop.formats.gguf_file import neighbours
from titan_loop.formats.llama_shape import Card
from titan_loop.formats.model_folder import folder_format, write_model_folder

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_DENSE = "mlp."
_NAMED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKS = {"w1": "w1_EFD", "w3": "w3_EFD", "w2": "w2_EDF"}


@dataclass(frozen=True, kw_only=True)
class MoEShape(UnrolledShape):
    """Llama's blocks with experts, a layer a visit; own fields are named as the options."""

    family: ClassVar[str] = "moe"
    gguf_architecture: ClassVar[str | None] = None
    normed_fix: ClassVar[str] = "train with model.norm_placement=readout"
    fixed_options: ClassVar[Mapping[str, Any]]
    """Options of the family that the format supports with one value only."""
    part: ClassVar[str] = "mlp."
    """Prefix of the mixture's tensors inside a layer."""
    matrices: ClassVar[Mapping[str, str]] = _NAMED
    """An expert's matrix in the format → the checkpoint's name for it."""
    bias: ClassVar[str | None] = None
    """Name, after `part`, of the bias on the choice of experts; None where the format has none."""
    bias_is_row: ClassVar[bool] = False
    """Whether that bias is a matrix of one row."""
    shared_always: ClassVar[bool] = False
    """Whether the format has a shared expert even in a model without one."""

    experts: int
    top_k: int
    expert_hidden_dim: int
    shared_experts: int = 0
    normalise_scores: bool = True
    score_scale: float = 1.0
    router: str
    routers: int = 1
    attentions: int = 1
    dense_layers: tuple[int, ...] = ()

    def checked(self) -> Self:
        """As in the base class; also refuses options and dense layers that the format lacks."""
        for name, value in self.fixed_options.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"model.{name}={getattr(self, name)}: the {self.title} format supports only "
                    f"model.{name}={value}; titan-loop convert export RUN --list names the "
                    "formats of this model"
                )
        shape = replace(super().checked(), dense_layers=tuple(self.dense_layers))  # a list in JSON
        shape.check_dense([shape.is_dense(visit) for visit in range(shape.n_layers)])
        return shape

    def check_dense(self, dense: list[bool]) -> None:
        """Raise `UserError` if the format does not allow a dense layer at a visit that has one.

        Args:
            dense: A flag for each visit, true if its layer has no experts.
        """

    def is_dense(self, visit: int) -> bool:
        """Return whether a layer of the format has no experts."""
        return self.visits[visit] + 1 in self.dense_layers

    def part_of(self, visit: int, parts: int) -> int:
        """Return the index of a visit's router or attention, of `parts`; 0 outside the loop."""
        looped = max(self.visits) + 1 - self.prelude_layers - self.coda_layers
        if not self.prelude_layers <= visit < self.n_layers - self.coda_layers:
            return 0
        return min((visit - self.prelude_layers) // looped, parts - 1)

    def mixture_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of one layer's mixture, a stack at a time."""
        wide, narrow = (self.expert_hidden_dim, self.dim), (self.dim, self.expert_hidden_dim)
        yield f"{self.part}gate.weight", (self.experts, self.dim)
        if self.bias is not None:
            yield f"{self.part}{self.bias}", (1, self.experts)[not self.bias_is_row :]
        for matrix, letter in self.matrices.items():
            for number in range(self.experts):
                name = f"{self.part}experts.{number}.{matrix}.weight"
                yield name, narrow if letter == "w2" else wide
        shared = self.stored_shared_experts * self.expert_hidden_dim
        for matrix, letter in self.matrices.items() if shared else ():
            size = (self.dim, shared) if letter == "w2" else (shared, self.dim)
            yield f"{self.part}shared_experts.{matrix}.weight", size

    @property
    def stored_shared_experts(self) -> int:
        """Number of shared experts in the format."""
        return self.shared_experts or int(self.shared_always)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        mixture = dict(self.mixture_shapes())
        for name, shape in super().tensor_shapes().items():
            visit, inner = _place(name)
            if visit is None or not inner.startswith(_DENSE) or self.is_dense(visit):
                shapes[name] = shape
            elif inner == f"{_DENSE}gate_proj.weight":
                shapes |= {f"model.layers.{visit}.{own}": size for own, size in mixture.items()}
        return shapes

    def fill(self, tensor: str) -> float | None:
        """Return 0 for a shared expert that the checkpoint does not have."""
        return None if self.shared_experts or ".shared_experts." not in tensor else 0.0

    def parameter_name(self, tensor: str) -> str:
        """As in the base class; an expert's matrix has the name of its stack."""
        return self._source(tensor)[0]

    def shape_in(self, reader: CheckpointReader, tensor: str) -> tuple[int, ...]:
        """As in the base class; a tensor cut from a stack has the shape of the cut."""
        stored, index = self._source(tensor)
        shape = tuple(reader.shape(stored))
        if index is None or shape[:1] != (self._length(stored),):
            return shape
        return (1, *shape[1:]) if isinstance(index, slice) else shape[1:]

    def _length(self, stored: str) -> int:
        """Return the length of a stack: the number of experts or, for biases, of routers."""
        layer = int(stored.split(".")[1])
        last = max(self.visits) + 1 - self.coda_layers
        routers = self.routers if self.prelude_layers <= layer < last else 1
        return routers if stored.endswith("_SE") else self.experts

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        """As in the base class, sliced from its stack."""
        stored, index = self._source(tensor)
        return super().read(reader, tensor) if index is None else _stack(reader, stored)[index]

    def _source(self, tensor: str) -> tuple[str, int | slice | None]:
        """Return the name of the checkpoint's tensor, and the index to read; None for all of it."""
        visit, inner = _place(tensor)
        if visit is None or not inner.startswith(self.part) or self.is_dense(visit):
            stored = super().parameter_name(tensor)
            attention = 0 if visit is None else self.part_of(visit, self.attentions)
            if attention:
                stored = stored.replace(".attention.", f".attention.later.{attention - 1}.")
            return stored, None
        layer, router = f"layers.{self.stored_layer(visit)}.moe.", self.part_of(visit, self.routers)
        match inner.removeprefix(self.part).split("."):
            case ["experts", number, matrix, _]:
                stack = _STACKS[self.matrices[matrix]]
                return f"{layer}routed_experts.inner_experts.{stack}", int(number)
            case ["shared_experts", matrix, _]:
                return f"{layer}shared_experts.{self.matrices[matrix]}.weight", None
            case ["gate", "weight"]:
                name = f"later_routers.{router - 1}" if router else "router"
                return f"{layer}{name}.gate.weight", None
        row = slice(router, router + 1) if self.bias_is_row else router
        return f"{layer}expert_bias_SE", row

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        config = super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id)
        return config | {
            "model_type": self.model_type,
            "architectures": [self.class_name],
            "output_router_logits": False,
            **self.mixture_config(),
        }

    def mixture_config(self) -> dict[str, Any]:
        """Return the fields of `config.json` on the experts."""
        raise NotImplementedError

    def card(self, name: str) -> Card:
        stored = len({*self.visits})
        note = f", unrolled from {stored}" if stored < self.n_layers else ""
        return Card(
            about=f"A language model of {self.n_layers} Llama blocks{note}; a token visits "
            f"{self.top_k} of {self.experts} experts.",
            tags=(self.model_type, "mixture-of-experts"),
        )


@dataclass(frozen=True, kw_only=True)
class MixtralShape(MoEShape):
    """`MixtralForCausalLM`: softmax, no bias, no dense layer."""

    title: ClassVar[str] = "Mixtral"
    model_type: ClassVar[str] = "mixtral"
    class_name: ClassVar[str] = "MixtralForCausalLM"
    fixed_options: ClassVar[Mapping[str, Any]] = {
        "router": "softmax",
        "normalise_scores": True,
        "score_scale": 1.0,
        "shared_experts": 0,
    }
    part: ClassVar[str] = "block_sparse_moe."
    matrices: ClassVar[Mapping[str, str]] = {"w1": "w1", "w3": "w3", "w2": "w2"}

    def check_dense(self, dense: list[bool]) -> None:
        """Refuse every dense layer."""
        if any(dense):
            raise _misplaced(self, "no layer")

    def check_biases(self, reader: CheckpointReader) -> None:
        """Raise `UserError` if a bias moves the choice of experts."""
        for layer in sorted({*self.visits}):
            name = f"layers.{layer}.moe.expert_bias_SE"
            if reader.read(name).any():
                raise UserError(
                    f"{name} is not zero, and Mixtral chooses by scores alone; export --to "
                    "ernie4_5_moe-unrolled, or train with --model.bias-rate 0"
                )

    def mixture_config(self) -> dict[str, Any]:
        return {
            "intermediate_size": self.expert_hidden_dim,
            "num_experts_per_tok": self.top_k,
            "num_local_experts": self.experts,
            "router_aux_loss_coef": 0.0,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        }


@dataclass(frozen=True, kw_only=True)
class GlmShape(MoEShape):
    """`Glm4MoeForCausalLM` without norms of queries and keys: sigmoid and bias."""

    title: ClassVar[str] = "GLM-4 MoE"
    model_type: ClassVar[str] = "glm4_moe"
    class_name: ClassVar[str] = "Glm4MoeForCausalLM"
    fixed_options: ClassVar[Mapping[str, Any]] = {"router": "sigmoid"}
    bias: ClassVar[str | None] = "gate.e_score_correction_bias"
    shared_always: ClassVar[bool] = True

    def check_dense(self, dense: list[bool]) -> None:
        """Refuse dense layers after sparse ones."""
        if any(dense[dense.index(False) :]):
            raise _misplaced(self, "only leading layers")

    def mixture_config(self) -> dict[str, Any]:
        dense = [self.is_dense(visit) for visit in range(self.n_layers)]
        return {
            "first_k_dense_replace": dense.index(False),
            "moe_intermediate_size": self.expert_hidden_dim,
            "n_group": 1,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.stored_shared_experts,
            "norm_topk_prob": self.normalise_scores,
            "num_experts_per_tok": self.top_k,
            "num_nextn_predict_layers": 0,
            "partial_rotary_factor": 1.0,
            "routed_scaling_factor": self.score_scale,
            "topk_group": 1,
            "use_qk_norm": False,
        }


@dataclass(frozen=True, kw_only=True)
class ErnieShape(MoEShape):
    """`Ernie4_5_MoeForCausalLM`: softmax and bias."""

    title: ClassVar[str] = "Ernie 4.5 MoE"
    model_type: ClassVar[str] = "ernie4_5_moe"
    class_name: ClassVar[str] = "Ernie4_5_MoeForCausalLM"
    fixed_options: ClassVar[Mapping[str, Any]] = {
        "router": "softmax",
        "normalise_scores": True,
        "score_scale": 1.0,
    }
    bias: ClassVar[str | None] = "moe_statics.e_score_correction_bias"
    bias_is_row: ClassVar[bool] = True

    def check_dense(self, dense: list[bool]) -> None:
        """Refuse dense layers between sparse ones."""
        if any(dense[slice(*_sparse_span(dense))]):
            raise _misplaced(self, "only leading and trailing layers")

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        """As in the base class; query and key rows are reordered, as Ernie rotates neighbours."""
        weight = super().read(reader, tensor)
        for name, heads in {"q_proj": self.n_heads, "k_proj": self.n_kv_heads}.items():
            if tensor.endswith(f"self_attn.{name}.weight"):
                return neighbours(weight, heads)
        return weight

    def mixture_config(self) -> dict[str, Any]:
        dense = [self.is_dense(visit) for visit in range(self.n_layers)]
        start, stop = _sparse_span(dense)
        return {
            "moe_intermediate_size": self.expert_hidden_dim,
            "moe_k": self.top_k,
            "moe_layer_end_index": stop - 1,
            "moe_layer_interval": 1,
            "moe_layer_start_index": start,
            "moe_norm_min": 1e-20,
            "moe_num_experts": self.experts,
            "moe_num_shared_experts": self.shared_experts,
            "router_aux_loss_coef": 0.0,
            "use_bias": False,
        }


def _sparse_span(dense: list[bool]) -> tuple[int, int]:
    """Return the first visit with experts, and the one after the last."""
    return dense.index(False), len(dense) - dense[::-1].index(False)


def _misplaced(shape: MoEShape, place: str) -> UserError:
    return UserError(
        f"model.dense_layers={[*shape.dense_layers]}: {shape.title} allows {place} of the "
        f"{shape.n_layers} unrolled ones to be dense; titan-loop convert export RUN --list "
        "names the formats of this model"
    )


def _place(tensor: str) -> tuple[int | None, str]:
    """Return a tensor's layer and its name inside it, or None and the full name if outside."""
    found = _LAYER.fullmatch(tensor)
    return (None, tensor) if found is None else (int(found[1]), found[2])


@lru_cache(maxsize=1)  # consecutive experts are slices of one stack
def _stack(reader: CheckpointReader, stored: str) -> Tensor:
    return reader.read(stored)


def _write(export: Export, output: Path) -> None:
    if isinstance(export.shape, MixtralShape):
        export.shape.check_biases(export.reader)
    try:
        write_model_folder(export, output)
    finally:
        _stack.cache_clear()


_KIND = "folder for transformers in which every visit is a layer of"
_OWN: Mapping[str, Any] = {"write": _write, "folder": None}
MIXTRAL_FOLDER = folder_format(f"{_KIND} Mixtral, for softmax without a bias", MixtralShape, **_OWN)
GLM_FOLDER = folder_format(f"{_KIND} GLM-4 MoE, for sigmoid", GlmShape, **_OWN)
ERNIE_FOLDER = folder_format(f"{_KIND} Ernie 4.5 MoE, for softmax with a bias", ErnieShape, **_OWN)
