"""Folders in the layout of xLLM-Loop's released mixtures of experts, in and out.

    moe.router.weight                  router
    moe.experts.weight1, 2, 3          w1, w2, w3 of all experts, stacked as rows
    moe.fc1, fc2, fc3                  shared experts
    moe.norm                           norm before the mixture

With one state, and neither an injection nor a norm in the loop, a model is of family `moe`, with
every export of that family; the others are of `xllm_moe`.

Source: the code of xLLM, `xllm/modules/moe`, and of xLLM-Loop, `xllm/models/transformer.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.families.xllm.formats import XllmShape, write_released
from titan_loop.formats.fields import Field, positive, unsupported
from titan_loop.formats.format import Export
from titan_loop.formats.llama_shape import LlamaShape
from titan_loop.formats.model_folder import folder_format
from titan_loop.models.family import ModelOptions

_STACKS = {"w1_EFD": "weight1", "w2_EDF": "weight2", "w3_EFD": "weight3"}
_SHARED = {"w1": "fc1", "w2": "fc2", "w3": "fc3"}
_EXPERTS = "mlp.experts."


@dataclass(frozen=True, kw_only=True)
class XllmMoEShape(XllmShape):
    """The shape of a released model whose layers all have experts."""

    title: ClassVar[str] = "xLLM mixture"
    family: ClassVar[str] = "xllm_moe"
    fixed: ClassVar[Mapping[str, Any]] = {
        **{name: value for name, value in XllmShape.fixed.items() if name != "num_experts"},
        "num_dense_layers": None,
        "moe_router_bias": False,
    }
    own_fields: ClassVar[Mapping[str, Field]] = {
        **XllmShape.own_fields,
        "experts": Field("num_experts"),
        "top_k": Field("num_activated_experts"),
        "expert_hidden_dim": Field("expert_inter_dim"),
        "shared_experts": Field("num_shared_experts", default=0, least=0),
    }
    of_layer: ClassVar[Mapping[str, str]] = {
        **{name: own for name, own in LlamaShape.of_layer.items() if not name.startswith("mlp.")},
        "mlp.gate.": "moe.router.gate.",
        _EXPERTS: "moe.routed_experts.inner_experts.",
        **{f"mlp.shared.{matrix}.": f"moe.shared_experts.{matrix}." for matrix in _SHARED},
    }

    experts: int
    top_k: int
    expert_hidden_dim: int
    shared_experts: int
    router: str
    normalise_scores: bool
    score_scale: float

    @classmethod
    def describes(cls, config: Mapping[str, Any]) -> bool:
        """As in the base class, for configs with experts."""
        model = config.get("model")
        return isinstance(model, dict) and "arch" in model and bool(model.get("num_experts"))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        model, fields = config["model"], super().read_fields(config)
        router = model.get("moe_router_score_func", "sigmoid")
        if router not in ("sigmoid", "softmax"):
            raise unsupported("model.moe_router_score_func", router, "sigmoid or softmax")
        scale = model.get("moe_router_scaling_factor") or 1.0
        return fields | {
            "router": router,
            "normalise_scores": fields["top_k"] > 1,
            "score_scale": positive("model.moe_router_scaling_factor", scale),
        }

    def options(self, family: str | None = None, **more: Any) -> ModelOptions:
        """As in the base class; a plain loop is of family `moe`."""
        return super().options(family or ("moe" if self.is_plain else None), bias_rate=0.0, **more)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        wide = (self.experts, self.expert_hidden_dim, self.dim)
        narrow = (self.experts, self.dim, self.expert_hidden_dim)
        shared = self.shared_experts * self.expert_hidden_dim
        mixture: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (self.experts, self.dim)}
        for stack in _STACKS:
            mixture[f"{_EXPERTS}{stack}"] = narrow if stack == "w2_EDF" else wide
        for matrix in _SHARED if shared else ():
            size = (self.dim, shared) if matrix == "w2" else (shared, self.dim)
            mixture[f"mlp.shared.{matrix}.weight"] = size
        shapes = {n: shape for n, shape in super().tensor_shapes().items() if ".mlp." not in n}
        for layer in range(self.n_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in mixture.items()}
        return shapes

    def zeros(self) -> dict[str, tuple[int, ...]]:
        """Return the biases of the choice, which released models do not have."""
        layers = range(self.n_layers)
        return {f"layers.{layer}.moe.expert_bias_SE": (1, self.experts) for layer in layers}

    def file_name(self, tensor: str) -> str:
        if tensor.endswith("post_attention_layernorm.weight"):
            return f"layers.{tensor.split('.')[2]}.moe.norm.weight"
        if ".mlp." not in tensor:
            return super().file_name(tensor)
        _, _, layer, _, part, *rest = tensor.split(".")
        names = {
            "gate": "router.weight",
            "experts": f"experts.{_STACKS.get(rest[0])}",
            "shared": f"{_SHARED.get(rest[0])}.weight",
        }
        return f"layers.{layer}.moe.{names[part]}"

    def file_shape(self, tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As in the base class; a stack is one matrix."""
        return (shape[0] * shape[1], shape[2]) if _EXPERTS in tensor else shape

    def loaded(self, tensor: str, stored: Tensor) -> Tensor:
        if _EXPERTS in tensor:
            return stored.unflatten(0, (self.experts, -1))
        return super().loaded(tensor, stored)

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        weight = super().read(reader, tensor)
        return weight.flatten(0, 1) if _EXPERTS in tensor else weight

    def to_config(self, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        return super().to_config(dtype=dtype, bos_id=bos_id, eos_id=eos_id) | {
            "moe_router_score_func": self.router,
            "moe_router_scaling_factor": self.score_scale,
        }

    def checked(self) -> Self:
        """As in the base class; a token's only score stays as it is, several are normalised."""
        if self.normalise_scores != (self.top_k > 1):
            raise UserError(
                f"model.normalise_scores={self.normalise_scores} with model.top_k={self.top_k}: "
                "the xLLM format divides scores by their sum if and only if top_k is above 1"
            )
        if self.is_depth_controlled:
            raise UserError(
                "the xLLM format has no mixture of experts with model.injection=orthogonal or "
                "linear, or with norms in the loop"
            )
        return super().checked()


def _write(export: Export, output: Path) -> None:
    for name in export.shape.zeros():
        if export.reader.read(name).any():
            raise UserError(
                f"{name} is not zero, and the xLLM layout of mixtures chooses by scores alone; "
                "train with --model.bias-rate 0 and loss.balance_weight"
            )
    write_released(export, output)


XLLM_MOE_FOLDER = folder_format(
    "folder in the layout of xLLM-Loop's released mixtures of experts",
    XllmMoEShape,
    write=_write,
    dtypes=("bfloat16",),
)
