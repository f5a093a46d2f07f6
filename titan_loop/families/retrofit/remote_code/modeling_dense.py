"""Layers of dense models, whose differences from Llama's are `config.block`; written by titan_loop.

before      x + attention(n1(x)),       x + mlp(n3(x))
after       x + n2(attention(x)),       x + n4(mlp(x))
both        x + n2(attention(n1(x))),   x + n4(mlp(n3(x)))
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    repeat_kv,
)

from .modeling_nanbeige import NanbeigeAttention, NanbeigeVisit

_LLAMA = {
    "attention_biases": "none",
    "attention_scale": None,
    "attention_softcap": 0.0,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": 0.0,
    "norm_offset": False,
    "norm_order": "before",
    "qk_norm": "none",
    "residual_multiplier": 1.0,
    "rope_attention_factor": 1.0,
    "rope_factor": 1.0,
    "rope_high": 4.0,
    "rope_low": 1.0,
    "rope_original": 0,
    "rope_scaling": "none",
    "rope_truncate": True,
    "rotary_dim": None,
    "unrotated_layers": (),
    "window": None,
    "window_rope_theta": None,
    "windowed_layers": (),
}


def option(config, name: str):
    """Return an option of the blocks; Llama's where the config has none."""
    return config.block.get(name, _LLAMA[name])


def capped(scores: Tensor, cap: float) -> Tensor:
    """Return c tanh(s / c); the scores themselves without a cap."""
    return cap * torch.tanh(scores / cap) if cap else scores


def sliding_mask(asked: dict, places: Tensor, window: int):
    """Return the mask of layers that see a window.

    Args:
        asked: Arguments of transformers' function.
        places: (L,) places of the queries among the keys.
    """
    whole = asked["attention_mask"]
    if isinstance(whole, Tensor) and whole.ndim == 4:  # made by `generate`, without the window
        keys = torch.arange(whole.shape[-1], device=whole.device)
        near = places[:, None] - keys < window
        if whole.dtype == torch.bool:
            return whole & near
        return whole.masked_fill(~near, torch.finfo(whole.dtype).min)
    # A copy: a window in the model's own config would make every cache a sliding one.
    config = copy.copy(asked["config"])
    config.sliding_window = window
    return create_sliding_window_causal_mask(**{**asked, "config": config})


class ScaledEmbedding(nn.Embedding):
    """An embedding times a factor."""

    def __init__(self, scale: float, *args):
        super().__init__(*args)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, L, D)."""
        return super().forward(input) * self.scale


class OffsetNorm(nn.Module):
    """RMSNorm with the gain 1 + w, in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis."""
        gain = 1 + self.weight.float()
        return nn.functional.rms_norm(x.float(), self.weight.shape, gain, self.eps).to(x.dtype)


def make_norm(config, width: int) -> nn.Module:
    """Return a norm of the model's kind."""
    kind = OffsetNorm if option(config, "norm_offset") else LlamaRMSNorm
    return kind(width, config.rms_norm_eps)


class Rotations(nn.Module):
    """Cosines and sines of layers that see all tokens, and of layers that see a window.

    Has no buffers: transformers loads models on a device without memory, and fills parameters only.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.dim = option(config, "rotary_dim") or config.head_dim
        # Version 5 of transformers moves the base.
        self.theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
        self.theta = self.theta or config.rope_theta

    def forward(self, hidden: Tensor, position_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return two pairs of (B, L, d)."""
        elements = torch.arange(0, self.dim, 2, device=hidden.device).float() / self.dim
        usual, local = (
            self.scaled(1.0 / self.theta**elements),
            option(self.config, "window_rope_theta"),
        )
        pairs = [self.turned(usual, position_ids, option(self.config, "rope_attention_factor"))]
        pairs *= 2
        if local is not None:
            pairs[1] = self.turned(1.0 / local**elements, position_ids, 1.0)
        return [tuple(part.to(hidden.dtype) for part in pair) for pair in pairs]

    def turned(self, frequencies: Tensor, position_ids: Tensor, factor: float):
        """Return cosines and sines."""
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * factor, angles.sin() * factor

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return frequencies for longer windows."""
        names = ("rope_scaling", "rope_factor", "rope_original", "rope_low", "rope_high")
        kind, factor, original, low, high = (option(self.config, name) for name in names)
        if kind == "linear":
            return frequencies / factor
        if kind == "llama3":
            turns = original * frequencies / (2 * math.pi)
            share = ((turns - low) / (high - low)).clamp(0, 1)
        elif kind == "yarn":
            first, last = (
                self.dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(self.theta))
                for turns in (high, low)
            )
            if option(self.config, "rope_truncate"):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.dim - 1)
            last += 0.001 * (first == last)
            elements = torch.arange(self.dim // 2, device=frequencies.device)
            share = 1 - ((elements - first) / (last - first)).clamp(0, 1)
        else:
            return frequencies
        return frequencies / factor * (1 - share) + frequencies * share


def capped_attention(
    module, queries, keys, values, attention_mask, scaling, dropout=0.0, softcap=0.0, **kwargs
):
    """Return (B, L, N, H) and None; transformers' own function for SDPA has no cap."""
    keys, values = (repeat_kv(x, module.num_key_value_groups) for x in (keys, values))
    scores = capped(queries @ keys.transpose(2, 3) * scaling, softcap)
    if attention_mask is None:  # one query sees every key; several begin with the first key
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        attention_mask = seen if len(seen) == 1 else seen.tril()
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask[..., : keys.shape[-2]]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
    return (weights @ values).transpose(1, 2), None


class DenseVisit(NanbeigeVisit):
    """Attention of one visit, with the model's scale, cap and window."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        scale = option(config, "attention_scale")
        self.scaling = self.scaling if scale is None else scale
        self.softcap, self.window = option(config, "attention_softcap"), option(config, "window")

    def forward(self, *args, windowed: bool = False, **kwargs) -> Tensor:
        """As in the base class; `windowed` says whether the layer sees a window."""
        if windowed:
            kwargs["sliding_window"] = self.window
        if self.softcap:
            kwargs["softcap"] = self.softcap
            if self.config._attn_implementation in ("sdpa", "eager"):
                self.own_attention = capped_attention
        return super().forward(*args, **kwargs)


class DenseAttention(NanbeigeAttention):
    """The projections, with biases and norms."""

    def __init__(self, config):
        super().__init__(config)
        biases = {"none": "", "qkv": "qkv", "qkvo": "qkvo"}[option(config, "attention_biases")]
        for name in biases:
            projection = getattr(self, f"{name}_proj")
            projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        self.normed = option(config, "qk_norm")
        if self.normed != "none":
            for name in "qk":
                width = getattr(self, f"{name}_proj").out_features
                width = self.head_dim if self.normed == "head" else width
                setattr(self, f"{name}_norm", make_norm(config, width))

    def forward(self, hidden: Tensor, visit: DenseVisit, rotations, **kwargs) -> Tensor:
        """Attend in `visit`; (B, L, D) in and out."""
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        queries, keys, values = (
            project(hidden) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normed == "all":
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys, values = (x.view(heads) for x in (queries, keys, values))
        if self.normed == "head":
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        if rotations is not None:
            width = rotations[0].shape[-1]
            turned = apply_rotary_pos_emb(queries[..., :width], keys[..., :width], *rotations)
            queries, keys = (
                torch.cat((x, whole[..., width:]), dim=-1) if width < whole.shape[-1] else x
                for x, whole in zip(turned, (queries, keys), strict=True)
            )
        out = visit(queries, keys, values, **kwargs)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1))


class DenseDecoderLayer(GradientCheckpointingLayer):
    """One layer, with norms before or after its branches."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = DenseAttention(config)
        self.mlp = LlamaMLP(config)
        self.order = option(config, "norm_order")
        self.multiplier = option(config, "residual_multiplier")
        names = {
            "before": ("input_layernorm", "post_attention_layernorm"),
            "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
            "both": (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
        }[self.order]
        for name in names:
            setattr(self, name, make_norm(config, config.hidden_size))

    def forward(self, hidden: Tensor, visit: DenseVisit, **kwargs) -> Tensor:
        """Apply the layer in `visit`; (B, L, D) in and out."""
        after = self.order != "before"
        branch = hidden if self.order == "after" else self.input_layernorm(hidden)
        branch = self.self_attn(branch, visit, **kwargs)
        branch = self.post_attention_layernorm(branch) if after else branch
        branch = hidden = hidden + branch * self.multiplier
        if self.order == "both":
            branch = self.pre_feedforward_layernorm(hidden)
        elif self.order == "before":
            branch = self.post_attention_layernorm(hidden)
        branch = self.mlp(branch)
        branch = self.post_feedforward_layernorm(branch) if after else branch
        return hidden + branch * self.multiplier


__all__ = ["DenseDecoderLayer", "DenseVisit"]
