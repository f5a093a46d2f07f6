"""What context parallelism refuses; `test_parity.py` runs what it allows."""

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.config import ParallelismConfig

from titan_loop.distributed.context_parallel import check_context_parallelism
from titan_loop.errors import UserError


@pytest.mark.parametrize(
    ("changes", "attention", "seq_len", "message"),
    [
        ({"spmd_backend": "spmd_types"}, "auto", 16, "needs parallelism.spmd_backend=partial_dten"),
        ({"context_parallel_load_balancer": "ptrr"}, "auto", 16, "leave it at headtail"),
        ({}, "varlen", 16, "does not work with model.attention=varlen; use flex or sdpa"),
        ({}, "auto", 18, "training.seq_len=18 must be divisible by 2 × parallelism.context"),
        ({"tensor_parallel_degree": 4}, "auto", 12, "and a rank's part of it by tensor_parallel"),
    ],
)
def test_what_context_parallelism_cannot_do_is_refused(changes, attention, seq_len, message):
    parallelism = ParallelismConfig(
        **{"context_parallel_degree": 2, "spmd_backend": "partial_dtensor", **changes}
    )
    with pytest.raises(UserError, match=message):
        check_context_parallelism(parallelism, seq_len=seq_len, attention=attention)
    parallelism.context_parallel_degree = 1
    check_context_parallelism(parallelism, seq_len=seq_len, attention=attention)
