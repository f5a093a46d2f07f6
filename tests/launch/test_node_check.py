"""What a rank reports of its node; the all-reduces run under a fake process group."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_loop.launch import node_check
from titan_loop.launch.health import NodeCheck
from titan_loop.launch.node_check import check_node, disk_problems, gpu_problems

GIB = 2**30
TASK = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURMD_NODENAME": "n2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "999",
}


def test_disk_and_gpu_problems(tmp_path):
    assert disk_problems(tmp_path, 0) == []
    (problem,) = disk_problems(tmp_path, 1e12)
    assert problem.endswith("GB free, 1e+12 are needed")
    assert "cannot be written (No such file" in disk_problems(tmp_path / "gone", 0)[0]
    assert gpu_problems(0, 0, 0.9) == []
    assert "of 99 GPUs are there" in gpu_problems(99, 0, 0.9)[0]


def test_memory_of_a_gpu_may_be_just_enough(monkeypatch):
    asked: list[int] = []

    def memory(gpu: int) -> tuple[int, int]:
        asked.append(gpu)
        return 60 * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    assert gpu_problems(4, 3, 0.75) == []
    assert asked == [3]
    assert gpu_problems(4, 3, 0.76) == ["GPU 3 has 60.0 of 80.0 GiB free"]
    assert gpu_problems(8, 3, 0.75) == ["4 of 8 GPUs are there"]
    assert gpu_problems(1, 0, 0.75) == ["4 of 1 GPUs are there"]

    def silent(gpu: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unknown\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", silent)
    assert gpu_problems(4, 3, 0.75) == ["GPU 3 does not answer: CUDA error: unknown"]


@pytest.fixture
def groups(monkeypatch) -> list[tuple[str, int, int, int]]:
    """Address, port, rank and size of every group that a check opens."""
    opened: list[tuple[str, int, int, int]] = []

    @contextmanager
    def group(*place) -> Iterator[None]:
        opened.append(place)
        yield

    monkeypatch.setattr(node_check, "_group", group)
    monkeypatch.setattr(node_check, "_all_reduce", lambda: None)
    return opened


def check(folder: Path, **changes: str) -> dict:
    environment = {**TASK, "TMPDIR": str(folder), **changes}
    needs = NodeCheck(free_disk_gigabytes=0)
    place = {"reports": folder, "folder": folder, "gpus": 0, "node_port": 20_000}
    check_node(needs, **place, environment=environment)
    return json.loads(next(folder.glob("rank-*.json")).read_text())


def test_a_rank_meets_its_node_and_then_all_ranks(tmp_path, groups):
    report = check(tmp_path)
    assert report.pop("clock") > 0
    assert report == {"node": "n2", "rank": 5, "problems": [], "failure": "", "phase": "all"}
    # Node 1 of two has the second port; rank 5 is its local rank 1.
    assert groups == [("127.0.0.1", 20_001, 1, 4), ("n1", 999, 5, 8)]


def test_a_failure_stays_with_its_phase_and_faults_are_reported(tmp_path, groups, monkeypatch):
    def fail() -> None:
        raise RuntimeError("wrong sum\nof many")

    monkeypatch.setattr(node_check, "_all_reduce", fail)
    report = check(tmp_path, TMPDIR=str(tmp_path / "gone"))
    assert (report["phase"], report["failure"]) == ("node", "RuntimeError: wrong sum")
    (problem,) = report["problems"]
    assert "gone cannot be written" in problem
    assert report["clock"] is None
    assert len(groups) == 1


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_a_sum_is_compared_exactly(monkeypatch, error):
    """Rank 2 of 4: every rank sends its number from 1 on, so the sum is 10."""
    sent: list[torch.Tensor] = []

    def all_reduce(values: torch.Tensor) -> None:
        sent.append(values.clone())
        values.fill_(10.0)[-1] += error

    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    if error:
        with pytest.raises(RuntimeError, match="an all-reduce returned a wrong sum"):
            node_check._all_reduce()
        return
    node_check._all_reduce()
    assert len(sent) == 3
    assert all(bool((values == 3).all()) and values.nbytes == 4 * 2**20 for values in sent)
