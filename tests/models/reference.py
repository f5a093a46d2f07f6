"""A slow float64 forward pass from the format's description alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_loop.models.decoder import LoopDecoder

Weights = dict[str, Tensor]
HEADS, HEAD_DIM = 4, 16


def gradients_of(model: LoopDecoder) -> dict[str, Tensor | None]:
    """Return every parameter's gradient, by its name without checkpointing."""
    named = model.named_parameters()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in named}


def reference_forward(
    model: LoopDecoder,
    tokens: Tensor,
    positions: Tensor,
    steps: int,
    following: Callable[[Weights, Tensor, list[Tensor]], Tensor] = lambda weights, e, states: (
        states[-1]
    ),
    *,
    norm_at_readout: bool = False,
    kind: str = "rope",
    outside: tuple[int, int] = (0, 0),
    start_factor: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is read of the state after every step, and its exit logits.

    `following(weights, embedding, states so far)` is what the next step starts from. `outside` is
    the number of layers before and after the loop. The first starts from `start_factor` times the
    embedding.
    """
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    attention = model.config.layers[0].attention
    group = HEADS // (attention.n_kv_heads or HEADS)  # heads of queries that share keys
    document = (positions == 0).cumsum(1)
    length = tokens.shape[1]
    allowed = (document[:, :, None] == document[:, None]) & torch.ones(length, length).tril().bool()

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in weights:  # Llama's branches end without one
            return x
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + model.config.norm.eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x: Tensor) -> Tensor:
        if kind != "rope":
            return x
        frequency = attention.rope.theta ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        angle = positions.double()[..., None] * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def layer(h: Tensor, name: str) -> Tensor:
        x = norm(h, f"{name}.attention_norm")
        q, k, v = (x @ weights[f"{name}.attention.qkv_linear.w{c}.weight"].T for c in "qkv")
        heads = []
        for head in range(HEADS):
            span = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            keys = slice(head // group * HEAD_DIM, (head // group + 1) * HEAD_DIM)
            scores = rotate(q[..., span]) @ rotate(k[..., keys]).mT / HEAD_DIM**0.5
            if kind == "relative":
                vectors = weights[f"{name}.attention.distance_scores.weight"]
                for b, i, j in allowed.nonzero().tolist():
                    distance = min(int(positions[b, i] - positions[b, j]), len(vectors) - 1)
                    scores[b, i, j] += q[b, i, span] @ vectors[distance] / HEAD_DIM**0.5
            if kind == "deberta":
                of_query, of_key = weights[f"{name}.attention.distance_scores.weight"][:, head]
                for b, i, j in allowed.nonzero().tolist():
                    distance = min(int(positions[b, i] - positions[b, j]), of_key.shape[1] - 1)
                    added = (
                        q[b, i, span] @ of_query[:, distance] + k[b, j, span] @ of_key[:, distance]
                    )
                    scores[b, i, j] += added / HEAD_DIM**0.5
            if kind == "bias":
                numbers = weights[f"{name}.attention.distance_scores.bias"][head]
                distance = (positions[:, :, None] - positions[:, None]).clamp(0, len(numbers) - 1)
                scores += numbers[distance]
            heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[..., keys])
        out = torch.cat(heads, -1) @ weights[f"{name}.attention.wo.weight"].T
        h = h + norm(out, f"{name}.attention_post_norm")
        x = norm(h, f"{name}.ffn_norm")
        w1, w2, w3 = (weights[f"{name}.feed_forward.w{i}.weight"].T for i in (1, 2, 3))
        out = (torch.nn.functional.silu(x @ w1) * (x @ w3)) @ w2
        return h + norm(out, f"{name}.ffn_post_norm")

    h = embedding = start_factor * weights["tok_embeddings.weight"][tokens]
    if kind == "learned":
        h = embedding = embedding + weights["positions.table.weight"][positions]
    states: list[Tensor] = []
    prelude, coda = outside
    for index in range(prelude):
        h = embedding = layer(h, f"layers.{index}")
    for step in range(steps):
        if step:
            h = following(weights, embedding, states)
        for index in range(prelude, len(model.layers) - coda):
            h = layer(h, f"layers.{index}")
        states.append(h if norm_at_readout else norm(h, "norm"))
    read = []
    for h in states:
        for index in range(len(model.layers) - coda, len(model.layers)):
            h = layer(h, f"layers.{index}")
        read.append(norm(h, "norm") if norm_at_readout or coda else h)
    if "exit_gate.weight" not in weights:
        return read, []
    gate = weights["exit_gate.weight"][0]
    return read, [state @ gate + weights["exit_gate.bias"] for state in read]
