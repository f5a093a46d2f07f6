"""A decoder spread as training spreads it, each rank's part of a batch, and whole gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import titan_loop.compat as compat  # before any torchtitan module
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.distributed.loop_fsdp import reshard_units
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.initialisation import keep_shard

NOISE = 0.05  # moves parameters off their symmetric initial point


def parallel_model(
    config: LoopDecoder.Config,
    parallelism: ParallelismConfig,
    *,
    training: TrainingConfig | None = None,
    **others: Any,
) -> tuple[LoopDecoder, ParallelDims]:
    """Build a model on all ranks; its whole parameters are the same on every layout.

    Args:
        config: Architecture.
        parallelism: Layout.
        training: fp32 without CUDA graphs by default.
        **others: Arguments of `parallelize_loop_decoder`.
    """
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    dims = meshes(
        dist.group.WORLD,
        dist.get_world_size() if dist.is_initialized() else 1,
        tensor_parallel_degree=parallelism.tensor_parallel_degree,
        context_parallel_degree=parallelism.context_parallel_degree,
        data_parallel_replicate_degree=parallelism.data_parallel_replicate_degree,
        expert_parallel_degree=parallelism.expert_parallel_degree,
        spmd_backend=parallelism.spmd_backend,
    )
    config.set_sharding(enable_sp=parallelism.enable_sequence_parallel)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = config.build()
    settings: dict[str, Any] = {"compile_config": CompileConfig(), "ac_config": None} | others
    parallelize_loop_decoder(
        model,
        parallel_dims=dims,
        training=training or TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        dump_folder="",
        **settings,
    )
    device = torch.device(compat.device_type())
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states()
        for seed, parameter in enumerate(model.parameters()):
            # Drawn on the CPU, so that ranks on GPUs (tools/bench/nccl_parity.py) have it, too.
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(parameter.shape, generator=generator).to(device)
            if isinstance(parameter, DTensor):
                part = torch.empty_like(parameter)
                keep_shard(part, noise)
                parameter.to_local().add_(NOISE * part.to_local())
            else:
                parameter.add_(NOISE * noise)
    return model, dims


@functools.cache
def meshes(group: dist.ProcessGroup | None, world: int, **degrees: Any) -> ParallelDims:
    """One set of meshes a `group`: torch 2.15's spmd_types remembers the first of equal ones."""
    return ParallelDims.from_config(ParallelismConfig(**degrees), world)


def part_of_rank(
    model: LoopDecoder, dims: ParallelDims, batch: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Any, Tensor]:
    """Return this rank's tokens, positions, attention masks and labels of a global batch."""
    degree, rank = 1, 0
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        degree, rank = mesh.size(), mesh.get_local_rank()
    windows, seq_len = batch[0].shape
    mine = slice(rank * windows // degree, (rank + 1) * windows // degree)
    device = torch.device(compat.device_type())
    tokens, positions, labels = (part[mine].to(device) for part in batch)
    masks, share = None, share_of_rank(dims, seq_len, device)
    if share is not None:
        masks = model.get_attention_masks(positions, share)
        tokens, positions, labels = (p[:, share.queries_L] for p in (tokens, positions, labels))
    return tokens, positions, masks, labels


def global_loss(loss: Tensor, dims: ParallelDims) -> float:
    """Return the sum of all ranks' losses."""
    total = loss.detach().clone()
    return float(
        dist_utils.dist_sum_tensor(total, dims.get_mesh("loss")) if dims.dp_cp_enabled else total
    )


def whole_gradients(model: LoopDecoder) -> dict[str, Tensor]:
    """Return the gradients after the last micro-batch by the names of the plain model."""
    reshard_units(model)
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name.replace("_checkpoint_wrapped_module.", "")] = whole.clone()
    return gradients
