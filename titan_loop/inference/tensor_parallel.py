"""Spreads a loaded model over tensor-parallel ranks for generation.

Every rank holds the cache of its heads and its rows of the readout head, makes the same calls, and
sees the same tokens: logits are gathered, and random numbers come from generators in the same
state. States are not sharded over the sequence, which is one token long in decoding.
"""

import copy

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_loop.distributed.vocabulary_parallel import share_vocabulary
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.initialisation import keep_shard


def spread_over_ranks(model: LoopDecoder, parallel_dims: ParallelDims) -> LoopDecoder:
    """Return the same model with its weights sharded over the ranks of `parallel_dims`.

    Args:
        model: The whole model, on every rank.
        parallel_dims: Degrees with tensor parallelism only, on the SPMD backend partial_dtensor.

    Raises:
        UserError: The degrees or the backend are others, or the ranks do not divide the heads.
    """
    ranks = parallel_dims.tp
    if ranks != parallel_dims.world_size or parallel_dims.spmd_backend != "partial_dtensor":
        raise UserError(
            f"generation spreads over tensor-parallel ranks alone: tensor_parallel={ranks} must be "
            f"the world size {parallel_dims.world_size}, with spmd_backend=partial_dtensor"
        )
    attention = model.config.layers[0].attention
    heads = attention.n_kv_heads or attention.n_heads
    if heads % ranks:
        raise UserError(f"tensor_parallel={ranks} must divide the {heads} key-value heads")
    config = copy.deepcopy(model.config)
    assert isinstance(config, LoopDecoder.Config)
    config.check_spreading(tensor_parallel=ranks, context_parallel=1)
    config.set_sharding(enable_sp=False)
    whole = dict(model.named_parameters())
    reference = model.tok_embeddings.weight
    dist_utils.set_spmd_backend(parallel_dims.spmd_backend)
    with torch.device("meta"):
        spread = config.build()
    spread.parallelize(parallel_dims)
    share_vocabulary(spread.lm_head, parallel_dims)
    spread.to_empty(device=reference.device)
    with torch.no_grad():
        spread.init_states()
        for name, child in spread.named_children():
            child.to(_dtype(model.get_submodule(name)))
        for name, parameter in spread.named_parameters():
            assert isinstance(parameter, DTensor)
            keep_shard(parameter, whole[name])
    spread.recurrent_steps = model.recurrent_steps
    return spread.eval()


def _dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's first tensor; None for a module without any."""
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].dtype if tensors else None
