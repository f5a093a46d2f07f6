"""Low-rank adapters of looped layers, each set of them for one step.

    y = W x + U_s V_s x,   s = min(r − f, S − 1) in step r ≥ f;   y = W x in earlier steps

A layer's S sets of U (out × k) and V (k × in) are rows of two parameters. Steps beyond the last set
use the last one. U starts at zero, so that a new model's adapters change nothing.

Source: Hu et al. 2021 (LoRA), arXiv 2106.09685; a set for each loop: Bae et al. 2024 (Relaxed
Recursive Transformers), arXiv 2410.20672, §2.3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear

from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.context import CacheSlot, LoopContext
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.joined import Joined

ADAPTERS = ("down", "up")
"""Names of V and U beside a `weight`."""


@dataclass(frozen=True, slots=True)
class AdapterSets:
    """Number and rank of a layer's adapters.

    Attributes:
        rank: k.
        sets: S.
        first_step: f.
    """

    rank: int
    sets: int
    first_step: int


class AdaptedLinear(Linear):
    """A linear map with S sets of adapters, of which `chosen` is in force.

    Attributes:
        chosen: Set of this visit, from 0; below 0 for none. A (B,) tensor where the rows of a batch
            are at different steps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Widths and adapters."""

        adapters: AdapterSets

        def place_adapters(self) -> None:
            """Cut V with the columns of the weight, U with its rows, over tensor-parallel ranks."""
            placed = self.sharding_config
            assert placed is not None
            rows_are_cut = placed.state_shardings["weight"] == dense_param_placement(tp=spmd.S(0))
            cut, whole = (
                dense_param_placement(tp=spmd.S(1 if rows_are_cut else 2)),
                dense_param_placement(tp=spmd.R),
            )
            up, down = (cut, whole) if rows_are_cut else (whole, cut)
            states = {**placed.state_shardings, "up": up, "down": down}
            self.sharding_config = replace(placed, state_shardings=states)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        rank, sets = config.adapters.rank, config.adapters.sets
        self.down = nn.Parameter(torch.empty(sets, rank, config.in_features))
        self.up = nn.Parameter(torch.empty(sets, config.out_features, rank))
        self.chosen: int | Tensor = -1

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, L, in) to (B, L, out)."""
        output = super().forward(input)
        if isinstance(self.chosen, Tensor):
            down, up = (matrix[self.chosen.clamp(min=0)] for matrix in (self.down, self.up))
            added = torch.bmm(torch.bmm(input, down.transpose(1, 2)), up.transpose(1, 2))
            return output + torch.where((self.chosen >= 0)[:, None, None], added, 0.0)
        if self.chosen < 0:
            return output
        return output + F.linear(F.linear(input, self.down[self.chosen]), self.up[self.chosen])


class AdaptedBlock(DenseBlock):
    """Llama's layer with adapters on every matrix."""

    @dataclass(kw_only=True, slots=True)
    class Config(DenseBlock.Config):
        """The layer and its adapters."""

        adapters: AdapterSets

        @property
        def adapted(self) -> list[AdaptedLinear.Config]:
            """The configs of the adapted maps; keys and values share one."""
            assert isinstance(self.attention, LoopAttention.Config)
            assert self.feed_forward is not None
            qkv, ffn = self.attention.qkv_linear, self.feed_forward
            assert isinstance(qkv, QKVLinear.Config)
            maps = [qkv.wq, qkv.wkv, self.attention.wo, ffn.w1, ffn.w2, ffn.w3]
            return [each for each in maps if isinstance(each, AdaptedLinear.Config)]

        @property
        def adapter_elements(self) -> int:
            """Number of weights of one set of adapters."""
            keys_too = [self.adapted[1], *self.adapted]
            return self.adapters.rank * sum(m.in_features + m.out_features for m in keys_too)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.adapters = config.adapters

    def forward(
        self,
        x_BLD: Tensor,
        context: LoopContext,
        cache_slot: CacheSlot | None = None,
        *,
        joined: Joined | None = None,
    ) -> Tensor:
        """Apply the layer with the adapters of `cache_slot.step`."""
        assert cache_slot is not None
        assert cache_slot.step is not None
        step, last = cache_slot.step - self.adapters.first_step, self.adapters.sets - 1
        chosen = step.clamp(max=last) if isinstance(step, Tensor) else min(step, last)
        for linear in self._adapted():
            linear.chosen = chosen
        return super().forward(x_BLD, context, cache_slot)

    def _adapted(self) -> Iterator[AdaptedLinear]:
        return (module for module in self.modules() if isinstance(module, AdaptedLinear))


def adapted_block(layer: DenseBlock.Config, adapters: AdapterSets) -> AdaptedBlock.Config:
    """Return a layer with adapters beside every matrix."""
    attention, ffn = layer.attention, layer.feed_forward
    assert isinstance(attention, LoopAttention.Config)
    assert ffn is not None
    qkv = attention.qkv_linear
    assert isinstance(qkv, QKVLinear.Config)
    qkv = replace(qkv, wq=_adapted(qkv.wq, adapters), wkv=_adapted(qkv.wkv, adapters))
    return AdaptedBlock.Config(
        **{
            **_values(layer),
            "attention": replace(attention, qkv_linear=qkv, wo=_adapted(attention.wo, adapters)),
            "feed_forward": replace(
                ffn, **{name: _adapted(getattr(ffn, name), adapters) for name in ("w1", "w2", "w3")}
            ),
        },
        adapters=adapters,
    )


def _adapted(linear: Linear.Config, adapters: AdapterSets) -> AdaptedLinear.Config:
    initial = {
        **(linear.param_init or {}),
        "up": nn.init.zeros_,
        "down": partial(normal_matrix, std=linear.in_features**-0.5),
    }
    return AdaptedLinear.Config(**{**_values(linear), "param_init": initial}, adapters=adapters)


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config) if field.init}
