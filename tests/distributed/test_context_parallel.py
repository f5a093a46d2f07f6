"""Shares of a window; `test_parity.py` runs them on ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torchtitan.config import ParallelismConfig

from titan_loop.distributed.context_parallel import (
    context_parallel_refusals,
    cut_columns,
    share_of_rank,
    window_share,
)


@pytest.mark.parametrize(
    ("changes", "attention", "seq_len", "message"),
    [
        ({}, "auto", 16, ""),
        ({}, "sdpa", 4, ""),
        ({"tensor_parallel_degree": 2}, "sdpa", 12, ""),
        ({"spmd_backend": "spmd_types"}, "auto", 16, "needs parallelism.spmd_backend=partial_dten"),
        ({"context_parallel_load_balancer": "ptrr"}, "auto", 16, "leave it at headtail"),
        ({}, "varlen", 16, "does not work with model.attention=varlen; use flex or sdpa"),
        ({}, "auto", 18, "=2 times 2 must divide training.seq_len=18; change"),
        ({"tensor_parallel_degree": 4}, "auto", 12, "and 4 (tensor_parallel_degree) a rank's part"),
    ],
)
def test_what_context_parallelism_cannot_do_is_refused(changes, attention, seq_len, message):
    settings = {"context_parallel_degree": 2, "spmd_backend": "partial_dtensor", **changes}
    for degree in (1, 2):
        parallelism = ParallelismConfig(**settings | {"context_parallel_degree": degree})
        found = context_parallel_refusals(parallelism, seq_len=seq_len, attention=attention)
        said = [str(refusal) for refusal in found]
        assert len(said) == (degree == 2 and message != "")
        assert all(message in each for each in said)


def test_ranks_take_a_chunk_from_the_front_and_one_from_the_back():
    first, second = (window_share(8, degree=2, rank=rank) for rank in (0, 1))
    assert first.queries_L.tolist() == [0, 1, 6, 7]
    assert second.queries_L.tolist() == [2, 3, 4, 5]
    assert first.keys_L.tolist() == second.keys_L.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    columns = {"tokens": torch.arange(16).view(2, 8), "depth": torch.tensor([3, 4])}
    cut = cut_columns(columns, second, whole={"depth"})
    assert cut["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert cut["depth"].tolist() == [3, 4]
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)
    dims: Any = SimpleNamespace(cp_enabled=True, get_mesh={"cp": mesh}.get)
    share = share_of_rank(dims, 8, "cpu")
    assert share is not None
    assert share.queries_L.tolist() == [2, 3, 4, 5]
