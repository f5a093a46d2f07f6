"""Looped mixtures of experts: options and architecture.

    h_r = n(block_N(… block_1(h_{r−1}) …)),   n = final norm, or the identity
    block:  x ← x + attention(n1(x)),   x ← x + mixture(n2(x))

The experts of a layer are one pool that all recurrent steps share; `routers` and `attentions` say
whether the steps also share router and attention. README.md beside this file has the symbols and
the published shapes.

Sources: "SMELT", arXiv 2609.01343; "How to loop MoE", arXiv 2609.35751; "Towards Looped Models Done
Right", arXiv 2610.06833, and its released code.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from titan_loop.bounds import FINITE, Hint
from titan_loop.errors import UserError
from titan_loop.families.moe.attention import StepAttention
from titan_loop.families.moe.decoder import MoEBlock, MoEDecoder
from titan_loop.families.moe.feed_forward import ALIGNED, Experts, LoopMoE, RouterGate
from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.family import RUNTIME_OPTIONS, Family, FamilyName, ModelSize
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.llama import LLAMA_SIZES, LlamaOptions, llama_config
from titan_loop.models.loop_config import residual_gain, width_ratio

SIZES = {
    **{name: LLAMA_SIZES[name] for name in ("debugmodel", "quickstart")},
    # Layers of the looped models of arXiv 2610.06833, Part I; its dense models' feed-forward width.
    "xllm": ModelSize(1536, 28, 24, 4352, 250_624, recurrent_steps=4, n_kv_heads=6),
}


@dataclass(kw_only=True)
class ExpertOptions:
    """The experts of a sparse layer; options of a family are this and the options of its loop."""

    experts: Annotated[int, Ge(2), Hint("a dense model is nanbeige")] = 8
    """Experts of a sparse layer, E."""

    top_k: Annotated[int, Ge(1)] = 2
    """Experts that a token visits in a sparse layer, k."""

    expert_hidden_dim: Annotated[int | None, Ge(1)] = None
    """Feed-forward width of an expert; None takes hidden_dim."""

    shared_experts: Annotated[int, Ge(0)] = 0
    """Experts of a sparse layer that every token visits, beside the k."""

    router: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function from a router's logits to scores."""

    normalise_scores: bool = True
    """Whether the scores of a token's k experts are divided by their sum."""

    score_scale: Annotated[float, Gt(0), FINITE] = 1.0
    """Factor on the scores of the chosen experts."""

    bias_rate: Annotated[float, Ge(0), FINITE] = 1e-3
    """Change of an expert's bias in a training step, against unequal loads; 0 turns it off."""

    def experts_canonical(self, hidden_dim: int | None) -> dict[str, Any]:
        """Return the experts' width."""
        width = self.expert_hidden_dim
        return {"expert_hidden_dim": hidden_dim if width is None else width}


@dataclass(kw_only=True, slots=True)
class MoEOptions(ExpertOptions, LlamaOptions):
    """Options of mixtures of experts; every field is a flag."""

    family: FamilyName = field(default="moe", init=False)

    routers: Annotated[int, Ge(1)] = 1
    """Number of routers of a looped layer: one for all steps, or one for each of the first steps;
    the last router serves all further steps."""

    attentions: Annotated[int, Ge(1)] = 1
    """Number of attentions of a looped layer: one for all steps, or one for each of the first
    steps; the last attention serves all further steps."""

    dense_layers: tuple[int, ...] = ()
    """Layers with a dense feed-forward of width hidden_dim, from 1."""

    def canonical(self) -> dict[str, Any]:
        """Return widths, one router if no looped layer is sparse, and dense layers in order."""
        assert self.n_layers is not None
        looped = range(self.prelude_layers + 1, self.n_layers - self.coda_layers + 1)
        dense = {*self.dense_layers}
        return {
            **LlamaOptions.canonical(self),
            **self.experts_canonical(self.hidden_dim),
            "dense_layers": tuple(sorted(dense)),
            "routers": min(self.routers, 1) if dense >= {*looped} else self.routers,
        }


def decoder_config(options: MoEOptions, shape: ModelSize, max_seq_len: int) -> MoEDecoder.Config:
    """Return the architecture; `UserError` also if experts and layers do not fit together."""
    _check(options, shape)
    config = llama_config(
        MoEDecoder.Config,
        options,
        shape,
        max_seq_len,
        dense_hidden_dim=shape.hidden_dim,
        bias_rate=options.bias_rate,
    )
    gain = residual_gain(options, shape)
    std = options.initializer_range / math.sqrt(width_ratio(options, shape))
    for index, layer in enumerate(config.layers):
        if options.attentions > 1 and index in config.looped:
            assert isinstance(layer.attention, LoopAttention.Config)
            layer.attention = StepAttention.Config.of(layer.attention, options.attentions)
        if index + 1 not in options.dense_layers:
            routers = options.routers if index in config.looped else 1
            mixture = mixture_config(options, shape, std=std, gain=gain, routers=routers)
            config.layers[index] = sparse(layer, mixture)
    return config


def _check(options: MoEOptions, shape: ModelSize) -> None:
    check_experts(options, shape)
    layers = range(1, shape.n_layers + 1)
    unknown = [layer for layer in options.dense_layers if layer not in layers]
    if unknown or len({*options.dense_layers}) == len(layers):
        raise UserError(
            f"model.dense_layers={list(options.dense_layers)} must name some of the layers 1 to "
            f"{len(layers)} and leave one with experts; a dense model is nanbeige"
        )


def check_experts(options: ExpertOptions, shape: ModelSize) -> None:
    """Raise `UserError` where experts, widths and router do not fit together."""
    experts, top_k = options.experts, options.top_k
    if top_k > experts:
        raise UserError(f"model.top_k={top_k} must be at most model.experts={experts}")
    for name, value in {"dim": shape.dim, "expert_hidden_dim": options.expert_hidden_dim}.items():
        if value is None or value % ALIGNED:
            raise UserError(f"model.{name}={value} must be a multiple of {ALIGNED} with experts")


def mixture_config(
    options: ExpertOptions, shape: ModelSize, *, std: float, gain: float, routers: int = 1
) -> LoopMoE.Config:
    """Return the mixture of a layer.

    Args:
        gain: Factor on `std` for matrices whose outputs are added to the state.
    """
    dim, experts = shape.dim, options.experts
    width = options.expert_hidden_dim
    assert width is not None
    matrix, output = partial(normal_matrix, std=std), partial(normal_matrix, std=std * gain)

    def linear(inputs: int, outputs: int, init: partial = matrix) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs, param_init={"weight": init})

    shared = width * options.shared_experts
    return LoopMoE.Config(
        num_experts=experts,
        routers=routers,
        load_balance_coeff=None,  # upstream's bias; `LoopMoE` has its own
        router=TokenChoiceTopKRouter.Config(
            num_experts=experts,
            gate=RouterGate.Config(
                in_features=dim, out_features=experts, param_init={"weight": matrix}
            ),
            top_k=options.top_k,
            score_func=options.router,
            route_norm=options.normalise_scores,
            route_scale=options.score_scale,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=dim,
                hidden_dim=width,
                num_experts=experts,
                param_init={"w1_EFD": matrix, "w2_EDF": output, "w3_EFD": matrix},
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(
                num_experts=experts, top_k=options.top_k
            ),
        ),
        shared_experts=(
            FeedForward.Config(
                w1=linear(dim, shared), w2=linear(shared, dim, output), w3=linear(dim, shared)
            )
            if shared
            else None
        ),
    )


def sparse(layer: DenseBlock.Config, mixture: LoopMoE.Config) -> MoEBlock.Config:
    """Return a layer with a mixture in place of its feed-forward."""
    return MoEBlock.Config(
        attention_norm=layer.attention_norm,
        attention=layer.attention,
        ffn_norm=layer.ffn_norm,
        moe=mixture,
        dropout=layer.dropout,
        branch_scale=layer.branch_scale,
    )


MOE = Family(
    name="moe",
    options=MoEOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"export", "generate", "held_out"}),
    runtime_options=RUNTIME_OPTIONS | {"bias_rate"},
)
