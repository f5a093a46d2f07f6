"""Context parallelism: ranks share a window; each computes its queries against all keys.

    window   0 1 2 3 4 5 6 7      2·n chunks for n ranks
    rank 0   0             7      a chunk from the front and one from the back, so that causal
    rank 1     1         6        attention costs every rank the same
    …

Only attention needs other tokens: the rotated keys and values of all ranks are gathered before it,
in the order of the ranks, and the backward pass reduces their gradients back.

Source: Llama 3, arXiv 2407.21783, §3.3.2 (all-gathered keys and values).
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module

from titan_loop.errors import Refusal
from titan_loop.models.context import WindowShare
from titan_loop.models.decoder import LoopDecoder


def context_parallel_refusals(
    parallelism: ParallelismConfig, *, seq_len: int, attention: str
) -> Iterator[Refusal]:
    """Refuse settings that context parallelism does not support; degree 1 supports all."""
    degree, backend = parallelism.context_parallel_degree, parallelism.spmd_backend
    refuse = partial(Refusal.of, "parallelism.context_parallel_degree", degree)
    if degree == 1:
        return
    tp = parallelism.tensor_parallel_degree if parallelism.enable_sequence_parallel else 1
    if seq_len % (2 * degree) or (seq_len // degree) % tp:
        part = f", and {tp} (tensor_parallel_degree) a rank's part of it" if tp > 1 else ""
        problem = f"times 2 must divide training.seq_len={seq_len}{part}"
        yield refuse(problem, "change the window or the degree")
    if attention == "varlen":
        yield refuse("does not work with model.attention=varlen", "use flex or sdpa")
    if backend != "partial_dtensor":
        yield refuse(f"needs parallelism.spmd_backend=partial_dtensor, not {backend}")
    if (balancer := parallelism.context_parallel_load_balancer) != "headtail":
        field = "parallelism.context_parallel_load_balancer"
        yield Refusal.of(field, balancer, "is not supported", "leave it at headtail")


def window_share(
    seq_len: int, *, degree: int, rank: int, device: torch.device | str = "cpu"
) -> WindowShare:
    """Return the positions of the rank's queries, and of all keys in the order of the gather."""
    chunks = torch.arange(seq_len, device=device).chunk(2 * degree)
    shares = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(degree)]
    return WindowShare(queries_L=shares[rank], keys_L=torch.cat(shares))


def share_of_rank(parallel_dims: ParallelDims, seq_len: int, device: Any) -> WindowShare | None:
    """Return this rank's share of every window; None without context parallelism."""
    if not parallel_dims.cp_enabled:
        return None
    mesh = parallel_dims.get_mesh("cp")
    return window_share(seq_len, degree=mesh.size(), rank=mesh.get_local_rank(), device=device)


def cut_columns(
    columns: Mapping[str, Tensor], share: WindowShare, *, whole: Container[str] = ()
) -> dict[str, Tensor]:
    """Return this rank's part of columns (B, L, …); names in `whole` lack the axis L and stay."""
    return {
        name: values if name in whole else values[:, share.queries_L]
        for name, values in columns.items()
    }


class SharedWindowAttention(Module):
    """An attention kernel that sees the keys and values of all ranks that share a window."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Takes over the kernel's placements, so that heads are split before the gather."""

        kernel: Module.Config

    def __init__(self, config: Config, *, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.kernel: Any = config.kernel.build()
        self.group = group

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any) -> Tensor:
        """Attend to the keys of the whole window; shapes and options as the kernel's."""
        # One collective for both, over the window's axis.
        both_2BLNH = all_gather_single_autograd(
            torch.stack((k_BLNH, v_BLNH)), gather_dim=2, group=self.group
        )
        return self.kernel(q_BLNH, *both_2BLNH.unbind(), **options)


def gather_keys_and_values(model: LoopDecoder, group: dist.ProcessGroup) -> None:
    """Let every layer's attention kernel see the keys and values of all ranks of `group`.

    Call it before tensor parallelism places the kernels, so that each sees one rank's heads.
    """
    for layer, config in zip(model.layers.values(), model.config.layers, strict=True):
        attention = layer.get_submodule("attention")
        kernel = config.attention.inner_attention
        shared = SharedWindowAttention.Config(
            kernel=replace(kernel, sharding_config=None), sharding_config=kernel.sharding_config
        )
        attention.add_module("inner_attention", shared.build(group=group))
