"""The process pool: order, failure on one rank, hang, crash, and a clean start after each."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import multiprocess
from tests.support.multiprocess import GlooPool, RankError, RankTimeoutError

PR_GET_PDEATHSIG = 2  # of linux/prctl.h


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


def signal_at_the_end_of_the_parent() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def random_number() -> float:
    return torch.rand(()).item()


def return_a_lambda() -> object:
    return lambda: None


@pytest.fixture
def pool(gloo_pool) -> GlooPool:
    return gloo_pool(2)


def test_results_come_back_in_rank_order_after_a_collective(pool):
    assert pool.run(rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]


def test_the_same_processes_serve_case_after_case(pool):
    assert pool.run(process_id) == pool.run(process_id)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are stopped on Linux alone")
def test_ranks_are_stopped_between_cases_and_end_with_the_session(pool):
    stats = [Path(f"/proc/{pid}/stat") for pid in pool.run(process_id)]
    states: list[str] = []
    for _ in range(6000):  # a signal takes its time: a minute at most
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]
        if states == ["T", "T"]:
            break
        time.sleep(0.01)
    assert states == ["T", "T"]
    assert pool.run(signal_at_the_end_of_the_parent) == [signal.SIGKILL, signal.SIGKILL]


def test_every_case_starts_from_the_same_seed(pool):
    assert pool.run(random_number) == pool.run(random_number)


def test_ranks_use_one_thread(pool):
    assert pool.run(torch.get_num_threads) == [1, 1]


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


def test_a_result_that_cannot_be_sent_is_the_cases_failure(pool):
    with pytest.raises(RankError, match="return_a_lambda failed on rank 0, 1"):
        pool.run(return_a_lambda)
