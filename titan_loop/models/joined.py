"""A layer's matrices joined into one product each, once a pass, for all R visits of the layer.

    q, k, v = x [W_q; W_k; W_v]ᵀ,   gate, up = x [W_1; W_3]ᵀ

Parameters stay as they are, so checkpoints, exports and optimisers see the separate matrices;
autograd adds the visits' gradients up in the joined one and cuts the sum once. Three products fewer
a visit. On several ranks matrices stay apart: a joined copy would live as long as the pass, longer
than FSDP keeps a layer's weights, and every policy of FSDP should give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.linear import Linear

Product: TypeAlias = tuple[Tensor, Tensor | None]
"""Weight and bias of a joined product."""

Joinable: TypeAlias = tuple[Sequence[nn.Linear], Sequence[nn.Linear]]
"""Matrices of `Joined.qkv` and of `Joined.gate_up`."""


class Joined(NamedTuple):
    """The joined matrices of one layer in one pass."""

    qkv: Product
    gate_up: Product


def join(linears: Sequence[nn.Linear]) -> Product:
    """Return weight and bias of one product for several of equal input, rows in their order."""
    weight = torch.cat([linear.weight for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias for linear in linears])


def can_join(linears: Sequence[nn.Module]) -> bool:
    """Return whether the modules do nothing but multiply; quantised or adapted ones do more."""
    plain = all(type(linear) is Linear for linear in linears)
    return plain and len({linear.bias is None for linear in linears}) == 1


class JoinableQKV(QKVLinear):
    """Three projections, or their joined product."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """As in `QKVLinear`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queries, self.keys = (
            linear.out_features // config.head_dim for linear in (self.wq, self.wk)
        )

    def heads(self, x_BLD: Tensor, joined: Joined) -> Tensor:
        """Return the heads of queries, keys and values, (B, L, N + 2·N_kv, H), in this order."""
        return F.linear(x_BLD, *joined.qkv).view(*x_BLD.shape[:2], -1, self.head_dim)

    def forward(self, x: Tensor, *, joined: Joined | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, L, heads, H) each."""
        if joined is None:
            return super().forward(x)
        q_BLNH, k_BLNH, v_BLNH = self.heads(x, joined).split(
            [self.queries, self.keys, self.keys], dim=2
        )
        return q_BLNH, k_BLNH, v_BLNH
