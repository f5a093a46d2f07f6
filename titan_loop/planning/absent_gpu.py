"""Stands in for a cluster's ranks and GPUs, so that one CPU process can act as rank 0.

process group   torch's fake one: of any size, every collective returns at once
tensors         FakeTensorMode: shapes and dtypes without values
device          tensors say "cpu", because a CPU build of torch cannot run autograd on fake
                CUDA tensors; configs have CUDA's defaults (`compat.assuming`), and CUDA's
                kernels replace the CPU's below
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._functional_collectives import all_to_all_single
from torch.nn.attention import flex_attention as torch_flex
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import compile as titan_compile
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.tools import utils as titan_utils

from titan_loop.checkpoint import model as saved_model
from titan_loop.distributed import muon
from titan_loop.errors import UserError
from titan_loop.models import initialisation
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder
from titan_loop.planning.cluster import Cluster
from titan_loop.training.verdict import StepVerdict


@contextmanager
def absent_gpu(cluster: Cluster, build_mask: Callable[..., Any]) -> Iterator[None]:
    """Make this process rank 0 of a cluster until the end of the block.

    `build_mask` is called instead of the compiled `create_block_mask`. Raises `UserError` if this
    process belongs to a process group already.
    """
    if dist.is_initialized():
        raise UserError("a rehearsal needs a process of its own: start it without torchrun")
    gpu = compat.CpuDevice()
    properties = SimpleNamespace(name="GPU", total_memory=int(cluster.gpu.memory_bytes))
    fused, new_group = F.rms_norm, dist.new_group

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is not None:
            return fused(input, normalized_shape, weight, eps)
        wide = input.float()  # several operations; their memory was not compared with a GPU's
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps or 0.0).rsqrt()
        return (wide * scale).type_as(input)

    replacements: list[tuple[Any, str, Any]] = [
        (titan_utils, "device_module", gpu),
        (gpu, "get_device_properties", lambda device=None: properties),
        (dist, "new_group", lambda *args, **own: new_group(*args, **{**own, "backend": "fake"})),
        (F, "rms_norm", rms_norm),
        (Tensor, "pin_memory", lambda tensor, *args: tensor),
        (nn.init, "trunc_normal_", lambda tensor, **options: tensor),  # it reads values
        (initialisation, "keep_shard", lambda parameter, whole: None),  # it cuts a view per rank
        # Both read the values of meshes.
        (muon, "layout", unset_fake_temporarily()(muon.layout)),
        (muon, "shared_group", unset_fake_temporarily()(muon.shared_group)),
        # Experts: every rank receives as many tokens as it sends: fake loads have no values.
        (AllToAllTokenDispatcher, "_sync_token_count_exchange", _unread_counts),
        (AllToAllTokenDispatcher, "_dispatch_token_exchange", _even_exchange),
        (AllToAllTokenDispatcher, "_combine_token_exchange", _even_exchange),
        (saved_model, "load_model", _shapes_of),
        (StepVerdict, "read", lambda verdict: (True, False)),  # finite, no request to stop
        # Flex: skip the check for a GPU, and inductor, whose kernels need one.
        (torch_flex, "_validate_device", lambda *tensors: None),
        (titan_attention, "_compiled_create_block_mask", build_mask),
        (titan_attention.FlexAttention, "_compiled_flex_attn", torch_flex.flex_attention),
        (titan_compile, "_maybe_regional_inductor_backend", lambda model, backend: backend),
    ]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # DTensor and FSDP warn of fake tensors on a CPU
        stack.enter_context(compat.assuming("cuda"))
        for owner, name, replacement in replacements:
            stack.enter_context(patch.object(owner, name, replacement))
        # `F.rms_norm` as one kernel, as on CUDA: several operations save more tensors.
        kernels = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for operation in (torch.ops.aten._fused_rms_norm, torch.ops.aten._fused_rms_norm_backward):
            kernels.impl(operation.default, _unread, "CPU")
            # Compiled code remembers which kernels an operation has, before this block and after.
            operation.default._dispatch_cache.clear()
            stack.callback(operation.default._dispatch_cache.clear)
        # As torchtitan does when it makes the process group.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        dist.init_process_group("fake", rank=0, world_size=cluster.ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        yield


def _shapes_of(checkpoint: Path, options: ModelOptions, *, max_seq_len: int) -> LoopDecoder:
    return build_decoder(replace(options, attention="sdpa"), max_seq_len=max_seq_len)


def _unread_counts(
    dispatcher: Any, sent_E: Tensor, received: Tensor, ranks: int
) -> tuple[Tensor, None, None]:
    return received.reshape(-1), None, None


def _even_exchange(dispatcher: Any, rows_RD: Tensor, group: Any, *splits: None) -> Tensor:
    ranks, rows = dispatcher.ep_mesh.size(), len(rows_RD)
    sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    return all_to_all_single(rows_RD, sizes, sizes, dispatcher.ep_mesh)


def _unread(*args: Any) -> Any:
    raise NotImplementedError  # fake tensors have no values
