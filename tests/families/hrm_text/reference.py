"""HRM-Text in slow float64 lines: heads one by one, its own mask and reach of gradients."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.models.decoder import LoopDecoder


def cycles(
    model: LoopDecoder, tokens_L: Tensor, *, prefix: int = 0, k: int | None = None
) -> Iterator[Tensor]:
    """Yield z_H (L, D) after every high cycle of a model in float64.

    Args:
        model: Its parameters are used as they are, so that gradients reach them.
        tokens_L: One document.
        prefix: Tokens that see each other.
        k: Passes that the gradient reaches; None for all.
    """
    weights = dict(model.named_parameters())
    config = model.config
    attention = config.layers[0].attention
    heads, half, low_cycles = attention.n_heads, len(config.layers) // 2, config.low_cycles
    width = config.dim // heads
    place = torch.arange(len(tokens_L))
    angles = place.double()[:, None] * attention.rope.theta ** (
        -torch.arange(width // 2).double() / (width // 2)
    )
    seen = (place[:, None] >= place) | ((place[:, None] < prefix) & (place < prefix))

    def norm(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm.eps).sqrt()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )

    def layer(x: Tensor, index: int) -> Tensor:
        def of(name: str) -> Tensor:
            return weights[f"layers.{index}.{name}.weight"]

        normed, mixed = norm(x), []
        gate = torch.sigmoid(normed @ of("attention.gate").T)
        for head in range(heads):
            here = slice(head * width, (head + 1) * width)
            q, k_, v = (normed @ of(f"attention.qkv_linear.w{part}")[here].T for part in "qkv")
            scores = rotate(q) @ rotate(k_).T / width**0.5
            mixed.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
        x = x + (gate * torch.cat(mixed, -1)) @ of("attention.wo").T
        normed = norm(x)
        up = F.silu(normed @ of("feed_forward.w1").T) * (normed @ of("feed_forward.w3").T)
        return x + up @ of("feed_forward.w2").T

    def stack(x: Tensor, layers: range) -> Tensor:
        for index in layers:
            x = layer(x, index)
        return norm(x)

    high = model.recurrent_steps
    high_reached = high if k is None else min(high, max(1, k - 1))
    low_reached = high * low_cycles if k is None else k - high_reached
    z_h = weights["tok_embeddings.weight"][tokens_L] * config.embedding_scale
    z_l = weights["low_start.weight"]
    for cycle in range(high):
        for number in range(cycle * low_cycles, (cycle + 1) * low_cycles):
            z_l = stack(z_l + z_h, range(half))
            if number < high * low_cycles - low_reached:
                z_l = z_l.detach()
        z_h = stack(z_h + z_l, range(half, 2 * half))
        if cycle < high - high_reached:
            z_h = z_h.detach()
        yield z_h
