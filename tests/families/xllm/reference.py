"""xLLM-Loop's models in float64, from tensors in the released layout.

Independent of `titan_loop`. Names follow the released checkpoints; as there, a norm is kept as an
offset from 1, and neighbouring elements of a head are rotated. Fields come from a released config.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def fields(**changed: Any) -> dict[str, Any]:
    """Return the model section of a small released config."""
    return {
        "arch": "huginn", "huginn_depth_control": True, "num_layers": 4, "model_dim": 32,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_head_dim": 8,
        "ffn_hidden_dim": 48, "vocab_size": 64, "output_size": -1, "swiglu": True,
        "apply_bias_term": True, "apply_rmsnorm": True, "rmsnorm_eps": 1e-6,
        "rope_base": 1_000_000.0, "loop_times": 3, "huginn_prelude_layers": 1,
        "huginn_recurrent_layers": 2, "huginn_coda_layers": 1, "huginn_state_init": "normal",
        "huginn_input_injection": "diagonal", "num_experts": 0,
        **changed,
    }  # fmt: skip


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return float64 tensors of the released layout whose every element matters."""
    generator = torch.Generator().manual_seed(seed)
    dim, wide = config["model_dim"], config["ffn_hidden_dim"]
    kv_dim = config["num_kv_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config["vocab_size"], dim)}
    for index in range(config["num_layers"]):
        rows = {"wq": dim, "wk": kv_dim, "wv": kv_dim, "wo": dim}
        for name, number in rows.items():
            shapes[f"layers.{index}.attention.{name}.weight"] = (number, dim)
        shapes[f"layers.{index}.attention.norm.weight"] = (dim,)
        part = f"layers.{index}.moe" if config["num_experts"] else f"layers.{index}.nffn"
        shapes[f"{part}.norm.weight"] = (dim,)
        if config["num_experts"]:
            count, inner = config["num_experts"], config["expert_inter_dim"]
            shapes[f"{part}.router.weight"] = (count, dim)
            shapes[f"{part}.experts.weight1"] = (count * inner, dim)
            shapes[f"{part}.experts.weight2"] = (count * dim, inner)
            shapes[f"{part}.experts.weight3"] = (count * inner, dim)
            wide = inner * config["num_shared_experts"]
        for name, shape in {"fc1": (wide, dim), "fc2": (dim, wide), "fc3": (wide, dim)}.items():
            if wide:
                shapes[f"{part}.{name}.weight"] = shape
    shapes["output.final_norm.weight"] = (dim,)
    shapes["output.output.weight"] = (config["vocab_size"], dim)
    prefix = {
        "huginn": "input_injection",
        "transformer": "loop_input_injection_module"
        if config.get("loop_input_injection", "none") != "none"
        else "dense_prelude_input_injection_module",
    }[config["arch"]]
    kind = _injection(config)
    if kind == "linear":
        shapes[f"{prefix}.adapter.weight"] = (dim, 2 * dim)
        shapes[f"{prefix}.adapter.bias"] = (dim,)
    elif kind != "none":
        shapes[f"{prefix}.input_adapter.weight"] = (dim, dim)
        shapes[f"{prefix}.A_log"] = shapes[f"{prefix}.dt_bias"] = (dim,)
    if config.get("huginn_prelude_norm") == "rms":
        shapes["huginn_prelude_norm_module.weight"] = (dim,)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
        for name, shape in shapes.items()
    }


def logits(weights: Weights, config: Mapping[str, Any], tokens_L: Tensor, start_LD: Tensor | None):
    """Return (L, V) logits of one document; the start state is given where it is noise."""
    x = weights["embed.weight"][tokens_L]
    if config["arch"] == "transformer":
        x = _transformer(weights, config, x)
    else:
        first, count = config["huginn_prelude_layers"], config["huginn_recurrent_layers"]
        x = _layers(weights, config, x, range(first))
        e = x
        if config.get("huginn_prelude_norm") == "rms":
            e = _norm(x, weights["huginn_prelude_norm_module.weight"], config)
        kind = config["huginn_state_init"]
        start = {"input": e, "zero": torch.zeros_like(e), "normal": start_LD}[kind]
        x = _recurrences(weights, config, start, e, range(first, first + count))
        x = _layers(weights, config, x, range(first + count, config["num_layers"]))
    x = _norm(x, weights["output.final_norm.weight"], config)
    return x @ weights["output.output.weight"].T


def _injection(config: Mapping[str, Any]) -> str:
    if config["arch"] == "transformer":
        ways = ("loop_input_injection", "dense_prelude_input_injection")
        return next((config[way] for way in ways if config.get(way, "none") != "none"), "none")
    return config["huginn_input_injection"]


def _transformer(weights: Weights, config: Mapping[str, Any], x: Tensor) -> Tensor:
    before = config.get("dense_prelude_input_layers", "")
    places = {int(place) for place in before.split(",") if place}
    source, e, embedded = config.get("dense_prelude_source_layer", -1), None, x
    loops = config.get("loop_times", 1)
    for index in [*range(config["num_layers"])] * loops:
        if config.get("loop_input_injection", "none") != "none" and index == 0:
            x = _injected(weights, config, x, embedded, "loop_input_injection_module")
        if index in places:
            x = _injected(weights, config, x, e, "dense_prelude_input_injection_module")
        x = _layers(weights, config, x, range(index, index + 1))
        if index == source:
            e = x
    return x


def _recurrences(
    weights: Weights, config: Mapping[str, Any], start: Tensor, e: Tensor, core: range
) -> Tensor:
    def update(state: Tensor, layers: range) -> Tensor:
        if config["huginn_input_injection"] != "none":
            state = _injected(weights, config, state, e, "input_injection")
        for _ in range(config.get("huginn_split_module_repeats", 1)):
            state = _layers(weights, config, state, layers)
        if config.get("huginn_recurrent_exit_norm") == "parameterless_rms":
            state = _norm(state, torch.zeros(()), config)
        return state

    hierarchy = config.get("huginn_hierarchical_state", "none")
    if hierarchy == "none":
        for _ in range(config["loop_times"]):
            start = update(start, core)
        return start
    high, low, middle = e, start, len(core) // 2
    of_high, of_low = (core[:middle], core[middle:]) if hierarchy == "split_hl" else (core, core)
    for _ in range(config["huginn_hierarchical_h_cycles"]):
        for _ in range(config["huginn_hierarchical_l_cycles"]):
            low = update(low + high, of_low)
        high = update(high + low, of_high)
    return high


def _injected(
    weights: Weights, config: Mapping[str, Any], state: Tensor, e: Tensor | None, name: str
) -> Tensor:
    assert e is not None
    if _injection(config) == "linear":
        weight, bias = weights[f"{name}.adapter.weight"], weights[f"{name}.adapter.bias"]
        return torch.cat([state, e], dim=-1) @ weight.T + bias
    step = F.softplus(weights[f"{name}.dt_bias"])
    decayed = torch.exp(-step * weights[f"{name}.A_log"].exp()) * state
    update = step * (e @ weights[f"{name}.input_adapter.weight"].T)
    if config.get("huginn_prelude_orthogonal"):
        share = (decayed * update).sum(-1, keepdim=True) / (
            update.square().sum(-1, keepdim=True) + 1e-6
        )
        decayed = decayed - share * update
    return decayed + update


def _layers(weights: Weights, config: Mapping[str, Any], x: Tensor, layers: range) -> Tensor:
    heads, kv_heads, width = (config[n] for n in ("num_heads", "num_kv_heads", "head_dim"))
    length = len(x)
    for index in layers:
        of = {
            name.removeprefix(f"layers.{index}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        h = _norm(x, of["attention.norm"], config)
        q, k, v = (
            (h @ of[f"attention.w{n}"].T).view(length, count, width)
            for n, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = _rotated(q, config), _rotated(k, config).repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("ind,jnd->nij", q, k) / width**0.5
        hidden = torch.ones(length, length).triu(1).bool()
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + torch.einsum("nij,jnd->ind", shares, v).flatten(1) @ of["attention.wo"].T
        if config["num_experts"]:
            x = x + _mixture(of, config, _norm(x, of["moe.norm"], config))
        else:
            matrices = (of[f"nffn.fc{number}"] for number in (1, 2, 3))
            x = x + _swiglu(_norm(x, of["nffn.norm"], config), *matrices)
    return x


def _swiglu(h: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return (F.silu(h @ first.T) * (h @ third.T)) @ second.T


def _mixture(of: Weights, config: Mapping[str, Any], h: Tensor) -> Tensor:
    """A loop over tokens and their experts, of the normed states (L, D)."""
    count, chosen = config["num_experts"], config["num_activated_experts"]
    stacks = [of[f"moe.experts.weight{number}"].chunk(count) for number in (1, 2, 3)]
    logits_LE = h @ of["moe.router"].T
    softmax = config["moe_router_score_func"] == "softmax"
    scores_LE = logits_LE.softmax(-1) if softmax else logits_LE.sigmoid()
    mixed = torch.zeros_like(h)
    for token, scores in enumerate(scores_LE):
        best = scores.topk(chosen).indices.tolist()
        total = scores[best].sum() if chosen > 1 else 1.0
        for expert in best:
            share = scores[expert] / total * (config["moe_router_scaling_factor"] or 1.0)
            mixed[token] += share * _swiglu(h[token], *(stack[expert] for stack in stacks))
    if config["num_shared_experts"]:
        mixed += _swiglu(h, *(of[f"moe.fc{number}"] for number in (1, 2, 3)))
    return mixed


def _rotated(x: Tensor, config: Mapping[str, Any]) -> Tensor:
    width = x.shape[-1]
    rates = config["rope_base"] ** (-torch.arange(0, width, 2).double() / width)
    turn = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(len(x)).double(), rates))
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def _norm(x: Tensor, offset: Tensor, config: Mapping[str, Any]) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + config["rmsnorm_eps"]).rsqrt() * (1 + offset)
