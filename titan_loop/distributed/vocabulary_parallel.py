"""The streamed readout under tensor parallelism: every rank holds a slice of the vocabulary.

The slices are Shard(0): equal numbers of rows rounded up, the last ones shorter. Softmax needs two
all-reduces per chunk: the largest logit, then the sums and the label's logit together.
"""

from collections.abc import Sequence

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.distributed import ParallelDims

from titan_loop.errors import UserError
from titan_loop.models.readout import LMHead
from titan_loop.models.vocabulary import Vocabulary


class SlicedVocabulary(Vocabulary):
    """The rows that this rank of `group` holds; raises `UserError` if a rank has none."""

    def __init__(self, rows: int, group: dist.ProcessGroup) -> None:
        ranks = dist.get_world_size(group)
        rows_per_rank = -(-rows // ranks)
        if rows_per_rank * (ranks - 1) >= rows:
            problem = f"{ranks} tensor-parallel ranks leave one without a row; use fewer ranks"
            raise UserError(f"model.vocab_size={rows}: {problem}")
        super().__init__(rows, start=rows_per_rank * dist.get_rank(group))
        self._rows_here = min(rows_per_rank, rows - self.start)
        self.group = group

    def local(
        self, head_weight_VD: Tensor, hidden_RBLD: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return this rank's rows, and states whose gradient is a partial sum.

        Each rank's gradient covers its slice of the vocabulary. The redistribution that replicated
        the state also sums the gradients: a DTensor says Partial, and under `spmd_types` the
        gradient of a tensor typed R is P.
        """
        hidden_RBLD = tuple(hidden_RBLD)
        if isinstance(head_weight_VD, DTensor):
            # A weight that is still sharded over data-parallel ranks has bypassed FSDP's hooks.
            assert head_weight_VD.placements == (Shard(0),), f"got {head_weight_VD.placements}"
            head_weight_VD = head_weight_VD.to_local()
            hidden_RBLD = tuple(map(_local_hidden, hidden_RBLD))
        assert len(head_weight_VD) == self._rows_here, f"{len(head_weight_VD)} rows"
        return head_weight_VD, hidden_RBLD

    def all_reduce_max(self, value: Tensor) -> None:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)

    def all_reduce_sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over all slices of tensors of one shape, in one collective."""
        stacked = torch.stack(values)
        dist.all_reduce(stacked, group=self.group)
        return stacked.unbind()


def share_vocabulary(head: LMHead, parallel_dims: ParallelDims) -> None:
    """Let the tensor-parallel ranks compute the streamed loss together, each with its slice."""
    if parallel_dims.tp_enabled:
        group = parallel_dims.get_mesh("tp").get_group()
        head.vocabulary = SlicedVocabulary(head.out_features, group)


def _local_hidden(hidden_BLD: Tensor) -> Tensor:
    assert isinstance(hidden_BLD, DTensor), "the head is sharded, its input is not a DTensor"
    assert hidden_BLD.placements == (Replicate(),), f"got {hidden_BLD.placements}"
    return hidden_BLD.to_local(grad_placements=[Partial()])
