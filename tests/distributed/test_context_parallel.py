"""What context parallelism refuses, and shares of a window; `test_parity.py` runs it on ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torchtitan.config import ParallelismConfig

from titan_loop.distributed.context_parallel import (
    check_context_parallelism,
    cut_columns,
    share_of_rank,
    window_share,
)
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
    with pytest.raises(UserError, match=message) as raised:
        check_context_parallelism(parallelism, seq_len=seq_len, attention=attention)
    assert ("tensor_parallel" in str(raised.value)) == ("tensor_parallel_degree" in changes)
    parallelism.context_parallel_degree = 1
    check_context_parallelism(parallelism, seq_len=seq_len, attention=attention)


@pytest.mark.parametrize(
    ("changes", "seq_len"),
    [({}, 4), ({"tensor_parallel_degree": 4}, 16), ({"tensor_parallel_degree": 2}, 12)],
)
def test_the_smallest_windows_that_ranks_can_share(changes, seq_len):
    settings = {"context_parallel_degree": 2, "spmd_backend": "partial_dtensor", **changes}
    check_context_parallelism(ParallelismConfig(**settings), seq_len=seq_len, attention="sdpa")
    # A rank's tokens are split further only where the sequence is.
    split = ParallelismConfig(**settings | {"tensor_parallel_degree": 16})
    with pytest.raises(UserError, match="and a rank's part of it by tensor_parallel_degree=16"):
        check_context_parallelism(split, seq_len=seq_len, attention="sdpa")
    split.enable_sequence_parallel = False
    check_context_parallelism(split, seq_len=seq_len, attention="sdpa")


def test_a_degree_of_0_is_refused():
    nothing = ParallelismConfig(context_parallel_degree=0)
    with pytest.raises(UserError, match="context_parallel_degree=0 must be at least 1"):
        check_context_parallelism(nothing, seq_len=16, attention="sdpa")


def test_ranks_take_a_chunk_from_the_front_and_one_from_the_back():
    first, second = (window_share(8, degree=2, rank=rank) for rank in (0, 1))
    assert first.queries_L.tolist() == [0, 1, 6, 7]
    assert second.queries_L.tolist() == [2, 3, 4, 5]
    assert first.keys_L.tolist() == second.keys_L.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    columns = {"tokens": torch.arange(16).view(2, 8), "depth": torch.tensor([3, 4])}
    cut = cut_columns(columns, second, whole={"depth"})
    assert cut["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert cut["depth"].tolist() == [3, 4]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_rank_has_the_share_of_its_place_in_the_mesh(enabled):
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)
    dims: Any = SimpleNamespace(cp_enabled=enabled, get_mesh={"cp": mesh}.get)
    share = share_of_rank(dims, 8, "cpu")
    if enabled:
        assert share is not None
        assert share.queries_L.tolist() == [2, 3, 4, 5]
    else:
        assert share is None
