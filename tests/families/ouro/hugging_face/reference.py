"""A looped language model in plain PyTorch, float64, from the format's description alone.

One sequence at a time, one head at a time, rotations as complex numbers: slow, and sharing nothing
with titan_loop or the exported code.
"""

import cmath
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference(NamedTuple):
    """What each recurrent step gives for one sequence."""

    hidden: list[Tensor]  # (L, D) a step
    exit_logits: list[Tensor]  # (L,) a step
    logits: list[Tensor]  # (L, V) a step


def load_reference_weights(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    config = json.loads((folder / "config.json").read_text())
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return config, {name: tensor.double() for name, tensor in tensors.items()}


def run_reference(folder: Path, tokens: list[int]) -> Reference:
    config, weights = load_reference_weights(folder)
    hidden = weights["model.embed_tokens.weight"][tokens]
    result = Reference([], [], [])
    for _ in range(config["total_ut_steps"]):
        for index in range(config["num_hidden_layers"]):
            hidden = layer(config, weights, f"model.layers.{index}.", hidden)
        hidden = norm(config, hidden, weights["model.norm.weight"])
        gate = weights["model.early_exit_gate.weight"][0]
        result.hidden.append(hidden)
        result.exit_logits.append(hidden @ gate + weights["model.early_exit_gate.bias"])
        result.logits.append(hidden @ weights["lm_head.weight"].T)
    return result


def layer(config: dict, weights: dict[str, Tensor], prefix: str, hidden: Tensor) -> Tensor:
    def named_norm(name: str, x: Tensor) -> Tensor:
        return norm(config, x, weights[f"{prefix}{name}.weight"])

    attended = attention(
        config, weights, f"{prefix}self_attn.", named_norm("input_layernorm", hidden)
    )
    hidden = hidden + named_norm("input_layernorm_2", attended)
    x = named_norm("post_attention_layernorm", hidden)
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    pre = x @ gate.T
    fed = (pre / (1 + torch.exp(-pre)) * (x @ up.T)) @ down.T
    return hidden + named_norm("post_attention_layernorm_2", fed)


def attention(config: dict, weights: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    width, heads = config["head_dim"], config["num_attention_heads"]
    shared_by = heads // config["num_key_value_heads"]
    query, key, value = (x @ weights[f"{prefix}{name}_proj.weight"].T for name in "qkv")
    outputs = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        shared = slice(head // shared_by * width, (head // shared_by + 1) * width)
        q, k = (rotate(config, part) for part in (query[:, own], key[:, shared]))
        scores = q @ k.T / math.sqrt(width)
        future = torch.ones_like(scores).triu(1).bool()
        outputs.append(scores.masked_fill(future, -math.inf).softmax(dim=-1) @ value[:, shared])
    return torch.cat(outputs, dim=-1) @ weights[f"{prefix}o_proj.weight"].T


def rotate(config: dict, x: Tensor) -> Tensor:
    """Turn (x_i, x_{i + H/2}) by position · theta^(−2i/H), as a complex number."""
    half = x.shape[-1] // 2
    turn = torch.tensor(
        [
            [cmath.exp(1j * m * config["rope_theta"] ** (-i / half)) for i in range(half)]
            for m in range(len(x))
        ],
        dtype=torch.complex128,
    )
    turned = torch.complex(x[:, :half], x[:, half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def norm(config: dict, x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight
