"""The node check: a rank's report of its node, and the verdict on all reports."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.multiprocess import free_port
from titan_loop.launch.node_check import (
    NodeCheck,
    bad_nodes,
    check_node,
    disk_problems,
    gpu_problems,
)
from titan_loop.launch.scheduler import Allocation

GIB = 2**30
ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)


def report(folder: Path, rank: int, **changes: object) -> None:
    content = {"node": f"n{1 + rank // 2}", "rank": rank, "phase": "done", "problems": []}
    (folder / f"rank-{rank}.json").write_text(json.dumps({**content, "failure": "", **changes}))


@pytest.fixture
def reports(tmp_path) -> Path:
    for rank in range(ALLOCATION.ranks):
        report(tmp_path, rank)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"problems": ["1 of 8 GPUs are there"]}, "1 of 8 GPUs are there"),
        ({"phase": "start"}, "rank 3 hung in its own checks"),
        ({"phase": "node", "failure": "E: x"}, "rank 3 failed at the all-reduce on its node: E: x"),
        ({"phase": "meet"}, "rank 3 did not reach rank 0: it hung"),
    ],
)
def test_one_bad_rank_makes_its_node_bad(reports, changes, reason):
    # The others miss it, which says nothing about them.
    report(reports, 0, phase="all", failure="E: connection closed")
    report(reports, 3, **changes)
    assert bad_nodes(reports, ALLOCATION) == ({"n2": reason}, [])
    (reports / "rank-3.json").unlink()
    assert bad_nodes(reports, ALLOCATION)[0] == {"n2": "1 of 2 ranks started"}


def test_what_no_node_is_to_blame_for(reports):
    assert bad_nodes(reports, ALLOCATION) == ({}, [])
    report(reports, 3, phase="all")
    report(reports, 4, phase="all", failure="RuntimeError: an all-reduce returned a wrong sum")
    faults = [
        "RuntimeError: an all-reduce returned a wrong sum",
        "the all-reduce of all nodes hung",
    ]
    assert bad_nodes(reports, ALLOCATION) == ({}, faults)


def test_disk_and_gpu_problems(tmp_path, monkeypatch):
    assert disk_problems(tmp_path, 0) == []
    (problem,) = disk_problems(tmp_path, 1e12)
    assert problem.endswith("GB free, 1e+12 are needed")
    assert "cannot be written (No such file" in disk_problems(tmp_path / "gone", 0)[0]
    assert gpu_problems(0, 0, 0.9) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (60 * GIB, 80 * GIB))
    assert gpu_problems(4, 3, 0.75) == []  # just enough
    assert gpu_problems(4, 3, 0.76) == ["GPU 3 has 60.0 of 80.0 GiB free"]
    assert gpu_problems(8, 3, 0.75) == ["4 of 8 GPUs are there"]

    def silent(gpu: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unknown\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", silent)
    assert gpu_problems(4, 3, 0.75) == ["GPU 3 does not answer: CUDA error: unknown"]


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    task = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place = {"TITAN_LOOP_NODE": "n2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {**task, **place, "TMPDIR": folder / "gone"}.items():
        monkeypatch.setenv(name, str(value))
    needs = NodeCheck(free_disk_gigabytes=0)
    check_node(needs, reports=folder, folder=folder, gpus=0, node_port=free_port())
    return json.loads((folder / "rank-0.json").read_text())


def test_a_rank_reports_its_phase_its_faults_and_its_failure(tmp_path, monkeypatch):
    found = check(tmp_path, monkeypatch)
    (problem,) = found.pop("problems")
    assert "gone cannot be written" in problem
    assert found == {"node": "n2", "rank": 0, "failure": "", "phase": "done"}
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.mul_(2.0))
    found = check(tmp_path, monkeypatch)
    failure = "RuntimeError: an all-reduce returned a wrong sum"
    assert (found["phase"], found["failure"]) == ("node", failure)
