"""The process pool: order, failure on one rank, hang, crash, and a clean start after each."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import multiprocess
from tests.support.multiprocess import GlooPool, RankError, RankTimeoutError


def rank_and_sum(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def process_id() -> int:
    return os.getpid()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")


def fail_on_rank_one_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def die_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os._exit(17)


@pytest.fixture
def pool(gloo_pool) -> GlooPool:
    return gloo_pool(2)


def test_results_come_back_in_rank_order_after_a_collective(pool):
    assert pool.run(rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]


def test_an_exception_on_one_rank_is_reported_with_its_rank_and_traceback(pool):
    before = pool.run(process_id)
    with pytest.raises(RankError, match="fail_on_rank_one failed on rank 1") as failure:
        pool.run(fail_on_rank_one)
    assert set(failure.value.reports) == {1}
    assert "ValueError: only here" in failure.value.reports[1]
    assert pool.run(rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]
    assert pool.run(process_id) == before, "nobody hung: a new process group is enough"


def test_a_rank_left_waiting_in_a_collective_does_not_poison_the_next_case(pool, monkeypatch):
    monkeypatch.setattr(multiprocess, "GRACE_SECONDS", 0.1)
    with pytest.raises(RankError, match="failed on rank 1") as failure:
        pool.run(fail_on_rank_one_while_others_wait, timeout=60)
    assert "ValueError: only here" in failure.value.reports[1]
    assert pool.run(rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hang_names_the_rank_and_where_it_stands(pool):
    with pytest.raises(RankTimeoutError, match="hung on rank 0 after 1 s") as failure:
        pool.run(hang_on_rank_zero, timeout=1)
    assert "hang_on_rank_zero" in failure.value.reports[0]
    assert pool.run(rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]


def test_a_crash_is_reported_with_the_exit_code(pool):
    with pytest.raises(RankError, match="exit code 17"):
        pool.run(die_on_rank_zero)
    assert pool.run(rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]
