"""A slow float64 forward pass from the format's description alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_loop.models.decoder import LoopDecoder

Weights = dict[str, Tensor]


def reference_forward(
    model: LoopDecoder,
    tokens: Tensor,
    positions: Tensor,
    steps: int,
    following: Callable[[Weights, Tensor, list[Tensor]], Tensor] = lambda weights, e, states: (
        states[-1]
    ),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return states and exit logits of every step, one head at a time.

    `following(weights, embedding, states so far)` is what the next step starts from.
    """
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    n_heads, head_dim = 4, 16
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angle = positions.double()[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    document = (positions == 0).cumsum(1)
    length = tokens.shape[1]
    allowed = (document[:, :, None] == document[:, None]) & torch.ones(length, length).tril().bool()
    h = embedding = weights["tok_embeddings.weight"][tokens]
    states = []
    for step in range(steps):
        if step:
            h = following(weights, embedding, states)
        for index in range(2):
            layer = f"layers.{index}"
            x = norm(h, f"{layer}.attention_norm")
            q, k, v = (x @ weights[f"{layer}.attention.qkv_linear.w{c}.weight"].T for c in "qkv")
            heads = []
            for head in range(n_heads):
                span = slice(head * head_dim, (head + 1) * head_dim)
                scores = rotate(q[..., span]) @ rotate(k[..., span]).mT / head_dim**0.5
                heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[..., span])
            out = torch.cat(heads, -1) @ weights[f"{layer}.attention.wo.weight"].T
            h = h + norm(out, f"{layer}.attention_post_norm")
            x = norm(h, f"{layer}.ffn_norm")
            w1, w2, w3 = (weights[f"{layer}.feed_forward.w{i}.weight"].T for i in (1, 2, 3))
            out = (torch.nn.functional.silu(x @ w1) * (x @ w3)) @ w2
            h = h + norm(out, f"{layer}.ffn_post_norm")
        h = norm(h, "norm")
        states.append(h)
    gate = weights["exit_gate.weight"][0]
    return states, [state @ gate + weights["exit_gate.bias"] for state in states]
