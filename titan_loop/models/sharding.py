"""Placements of a looped decoder under tensor and sequence parallelism (declared only).

The final norm runs inside the loop, so under sequence parallelism it returns a sequence-sharded
state for the next step, and a parameter-free module gathers that state for readout and gate. The
gate's weight and output are invariant (`I`): declared `R`, its gradient would be counted once per
tensor-parallel rank.
"""

from typing import Any

import spmd_types as spmd
from torchtitan.models.common.attention import BaseAttention
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout

from titan_loop.models.attention import LoopAttention
from titan_loop.models.block import DenseBlock
from titan_loop.models.norms import AllHeadsNorm
from titan_loop.models.positions import LearnedPositions


def gathered_state(*, enable_sp: bool) -> ShardingConfig:
    """Gather the state for readout and gate; `enable_sp`: states are sharded between layers."""
    return ShardingConfig(
        in_src_shardings={"input": state_placement(enable_sp)},
        in_dst_shardings={"input": dense_activation_placement(tp=spmd.R)},
    )


def replicated_gate() -> ShardingConfig:
    """Replicate the exit gate and count its gradient once."""
    invariant = dense_activation_placement(tp=spmd.I)
    return ShardingConfig(
        state_shardings=dict.fromkeys(("weight", "bias"), dense_param_placement(tp=spmd.I)),
        in_src_shardings={"input": dense_activation_placement(tp=spmd.R)},
        in_dst_shardings={"input": invariant},
        out_src_shardings=invariant,
    )


def replicated_table(*, enable_sp: bool) -> ShardingConfig:
    """Replicate a table whose rows are added to the embedding, and count its gradient once."""
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.I)},
        in_src_shardings={"input": dense_activation_placement(tp=spmd.R)},
        in_dst_shardings={"input": dense_activation_placement(tp=spmd.R)},
        out_src_shardings=dense_activation_placement(tp=spmd.I),
        out_dst_shardings=state_placement(enable_sp),
        local_map=LocalMapConfig(in_grad_placements=None),
    )


def mixed_states(
    *names: str, weights: tuple[str, ...] = ("weight",), enable_sp: bool
) -> ShardingConfig:
    """Mix states without moving them; `weights`, (D,) or (1,), are placed like a norm's gain."""
    state = state_placement(enable_sp)
    gain = norm_config(enable_sp=enable_sp).state_shardings["weight"]
    return ShardingConfig(
        state_shardings=dict.fromkeys(weights, gain),
        in_src_shardings=dict.fromkeys(names, state),
        out_src_shardings=state,
    )


def state_placement(enable_sp: bool) -> SpmdLayout:
    """Return the placement of the state between layers."""
    if enable_sp:
        return dense_sequence_parallel_placement()
    return dense_activation_placement(tp=spmd.I)


def set_parts_sharding(decoder: Any, *, enable_sp: bool) -> None:
    """Place the parts outside the layers of a looped decoder, a `LoopDecoder.Config`."""
    set_decoder_sharding_config(decoder, enable_sp=enable_sp)
    decoder.norm.sharding_config = norm_config(enable_sp=enable_sp)
    decoder.state_gather.sharding_config = gathered_state(enable_sp=enable_sp)
    if decoder.exit_gate is not None:
        decoder.exit_gate.sharding_config = replicated_gate()
    if isinstance(decoder.positions, LearnedPositions.Config):
        decoder.positions.table.sharding_config = replicated_table(enable_sp=enable_sp)
    if decoder.injection is not None:
        decoder.injection.sharding_config = mixed_states(
            "hidden_BLD", "embedding_BLD", enable_sp=enable_sp
        )


def set_block_sharding(layer: DenseBlock.Config, *, enable_sp: bool) -> None:
    """Shard a layer's heads and dense feed-forward over the tensor-parallel ranks."""
    for norm in layer.norms:
        norm.sharding_config = norm_config(enable_sp=enable_sp)
    set_attention_sharding(layer.attention, enable_sp=enable_sp)
    if layer.feed_forward is not None:
        set_dense_ffn_sharding(
            layer.feed_forward, attn_x_layout=state_placement(enable_sp), enable_sp=enable_sp
        )


def set_attention_sharding(attention: BaseAttention.Config, *, enable_sp: bool) -> None:
    """Shard attention over its heads."""
    set_gqa_attention_sharding(attention, enable_sp=enable_sp)
    assert isinstance(attention, LoopAttention.Config)
    set_gqa_inner_attention_local_map(attention.inner_attention)
    if attention.gate is not None:
        attention.gate.sharding_config = colwise_config()
    heads = dense_activation_placement(tp=spmd.S(2))
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            # A norm of all heads needs those of every rank.
            inside = (
                dense_activation_placement(tp=spmd.R)
                if isinstance(norm, AllHeadsNorm.Config)
                else heads
            )
            norm.sharding_config = ShardingConfig(
                state_shardings={"weight": dense_param_placement(tp=spmd.R)},
                in_src_shardings={"x": heads},
                in_dst_shardings={"x": inside},
                out_src_shardings=inside,
                out_dst_shardings=heads,
            )
    attention.rope.sharding_config = ShardingConfig(
        in_src_shardings={"query": heads, "key": heads},
        in_dst_shardings={"query": heads, "key": heads},
        out_src_shardings=(heads, heads),
        local_map=LocalMapConfig(in_grad_placements=(heads, heads)),
    )
