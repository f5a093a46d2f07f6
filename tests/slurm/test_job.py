"""What a job decides from records, variables and reports; needs no SLURM."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.runs.exit_reports import RankExit
from titan_loop.slurm import job
from titan_loop.slurm.allocation import Allocation
from titan_loop.slurm.health import bad_nodes
from titan_loop.slurm.node_check import disk_problems, gpu_problems
from titan_loop.slurm.record import (
    Restarts,
    newest_checkpoints,
    read_jobs,
    read_restarts,
    replace_job,
    write_jobs,
    write_restarts,
)
from titan_loop.slurm.requeue import final_code, lone_node
from titan_loop.slurm.site import Site

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)


def report(folder: Path, node: str, rank: int, **changes: object) -> None:
    content = {
        "node": node, "rank": rank, "phase": "all", "problems": [], "failure": "", "clock": 100.0,
        **changes,
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def all_good(folder: Path) -> None:
    for number, node in enumerate(ALLOCATION.nodes):
        for local in range(2):
            report(folder, node, 2 * number + local)


def test_good_nodes(tmp_path):
    all_good(tmp_path)
    assert bad_nodes(tmp_path, ALLOCATION) == ({}, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"problems": ["1 of 8 GPUs are there"]}, "1 of 8 GPUs are there"),
        ({"phase": "start"}, "rank 3 hung in its own checks"),
        ({"phase": "node", "failure": "E: x"}, "rank 3 failed at the all-reduce on its node: E: x"),
        ({"phase": "meet"}, "rank 3 did not reach rank 0: it hung"),
        ({"clock": 107.5}, None),  # the other rank of the node disagrees
    ],
)
def test_one_bad_rank_makes_its_node_bad(tmp_path, changes, reason):
    all_good(tmp_path)
    # The others miss it, which says nothing about them.
    report(tmp_path, "n1", 0, failure="E: connection closed")
    report(tmp_path, "n2", 3, **changes)
    bad, others = bad_nodes(tmp_path, ALLOCATION)
    assert bad == ({} if reason is None else {"n2": reason})
    assert others == (["E: connection closed"] if reason is None else [])


def test_what_no_node_is_to_blame_for(tmp_path):
    all_good(tmp_path)
    report(tmp_path, "n2", 3, clock=None)
    report(tmp_path, "n3", 4, failure="RuntimeError: an all-reduce returned a wrong sum")
    assert bad_nodes(tmp_path, ALLOCATION) == (
        {},
        ["RuntimeError: an all-reduce returned a wrong sum", "the all-reduce of all nodes hung"],
    )


def test_a_node_without_reports_and_one_with_another_clock(tmp_path):
    all_good(tmp_path)
    report(tmp_path, "n3", 4, clock=93.0)
    report(tmp_path, "n3", 5, clock=93.1)
    assert bad_nodes(tmp_path, ALLOCATION)[0] == {"n3": "its clock is -7.0 s off"}
    (tmp_path / "rank-3.json").unlink()
    assert bad_nodes(tmp_path, ALLOCATION)[0] == {"n2": "1 of 2 ranks started"}


def test_disk_and_gpu_problems(tmp_path):
    assert disk_problems(tmp_path, 0) == []
    (problem,) = disk_problems(tmp_path, 1e12)
    assert problem.endswith("GB free, 1e+12 are needed")
    assert "cannot be written (No such file" in disk_problems(tmp_path / "gone", 0)[0]
    assert gpu_problems(0, 0, 0.9) == []
    assert "of 99 GPUs are there" in gpu_problems(99, 0, 0.9)[0]


def test_restarts_count_while_no_checkpoint_comes(tmp_path):
    restarts = Restarts(bad_nodes={"n1": "gone"})
    restarts.begin({}, is_restart=True)
    restarts.begin({}, is_restart=True)
    assert restarts.fruitless == 2
    restarts.begin({"1a": 5}, is_restart=True)
    assert restarts.fruitless == 0
    restarts.begin({"1a": 5}, is_restart=True)
    write_restarts(tmp_path, "1a", restarts)
    read = read_restarts(tmp_path, "1a")
    assert (read.fruitless, read.bad_nodes) == (1, {"n1": "gone"})
    read.begin({"1a": 5}, is_restart=False)  # submitted anew
    assert read == Restarts(checkpoints={"1a": 5})
    assert read_restarts(tmp_path, "1b") == Restarts()


def test_newest_checkpoints_of_a_recipe_or_a_stage(tmp_path):
    for run, step in (("1a", 9), ("1a", 10), ("1b", 3)):
        manifest = tmp_path / run / "checkpoints" / f"step-{step}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    (tmp_path / "1b" / "checkpoints" / "step-4").mkdir()  # never finished
    assert newest_checkpoints(tmp_path, None) == {"1a": 10, "1b": 3}
    assert newest_checkpoints(tmp_path, "1b") == {"1b": 3}


def test_a_successor_takes_the_place_in_the_record(tmp_path):
    write_jobs(tmp_path, {"1a": "7", "1b": "8"})
    replace_job(tmp_path, "7", "9")
    assert read_jobs(tmp_path) == {"1a": "9", "1b": "8"}
    replace_job(tmp_path / "by-hand", "7", "9")
    (tmp_path / "slurm" / "jobs.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="format version 99"):
        read_jobs(tmp_path)


def test_the_command_and_environment_of_a_step():
    site = Site(container=("apptainer", "exec", "i.sif"), srun_flags=("--mpi=none",))
    command = ALLOCATION.srun(site, "train", "quickstart")
    assert command[0] == "srun"
    assert "--ntasks=6" in command
    assert command[-7:] == [
        *("--mpi=none", "apptainer", "exec", "i.sif", "titan-loop", "train", "quickstart"),
    ]
    site = Site(network_interface="ib0", rendezvous_host="10.0.0.1")
    variables = ALLOCATION.rank_environment(site, port=5, environment={"SLURM_CPUS_PER_TASK": "4"})
    assert variables == {
        "SLURM_CPUS_PER_TASK": "4",
        "SRUN_CPUS_PER_TASK": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
    }
    assert ALLOCATION.rank_environment(Site(), port=5, environment={})["MASTER_ADDR"] == "n1"


def test_ports_of_jobs_and_starts_differ():
    ports = {
        Allocation(job=str(job), restarts=restarts, nodes=(), ranks_per_node=1, gpus_per_node=0)
        .port()
        for job in range(1000, 1020)
        for restarts in range(4)
    }  # fmt: skip
    assert len(ports) == 80
    assert min(ports) >= 20_000
    assert max(ports) + 50 <= 32_768


@pytest.mark.parametrize("tasks", ["", "two"])
def test_a_batch_script_must_say_how_many_ranks(tasks):
    with pytest.raises(UserError, match="--ntasks-per-node"):
        Allocation.current({"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": tasks})


@pytest.mark.parametrize(
    ("code", "exits", "final"),
    [
        (0, [0, 0], 0),
        (75, [75, 75], None),  # stopped and saved
        (134, [75], None),  # a hung rank's peer aborted
        (137, [1], None),
        (75, [75, 1], None),
        (138, [], None),  # died of SIGUSR1 before Python could handle it
        (134, [0], None),  # complete, but a rank aborted on its way out
        (1, [], None),  # srun itself failed
        (2, [2, 2], 2),
        (137, [2], 2),  # the others waited for it and were killed
        (134, [75, 3], 3),
        (130, [], 130),
    ],
)
def test_which_exits_have_a_job_started_again(code, exits, final):
    reports = [RankExit(rank, f"n{rank}", exit) for rank, exit in enumerate(exits)]
    assert final_code(code, reports) == final


@pytest.mark.parametrize(
    ("mistaken", "lone"),
    [
        ([(3, "n2")], "n2"),
        ([(2, "n2"), (3, "n2")], "n2"),
        ([(0, "n1"), (1, "n1")], ""),  # rank 0 says so
        ([(3, "n2"), (4, "n3")], ""),  # two nodes do
        ([(3, "")], ""),  # nobody knows where it was
    ],
)
def test_a_mistake_of_one_node_without_rank_zero_is_the_node_s(mistaken, lone):
    exits = [RankExit(rank, node, 2) for rank, node in mistaken] + [RankExit(9, "n9", 75)]
    assert lone_node(exits) == lone
    assert final_code(143, exits) == (None if lone else 2)
    assert final_code(2, exits) == (None if lone else 2)
    assert final_code(143, [*exits, RankExit(8, "n8", 3)]) == (3 if lone else 2)


class Check:
    """A process, and the clock of its job: it starts after 500 s and takes 100 s from then on."""

    def __init__(self, starts: bool) -> None:
        self.now, self.starts, self.killed = 0.0, starts, False

    def __call__(self, *args: object, **options: object) -> "Check":  # as Popen
        return self

    def __enter__(self) -> "Check":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def there(self) -> bool:
        return self.starts and self.now >= 500

    def poll(self) -> int | None:
        return 0 if self.starts and self.now >= 600 else None

    def wait(self, limit: float | None = None) -> int:
        if self.killed:
            return -9
        end = 600.0 if self.starts else math.inf
        if limit is not None and self.now + limit < end:
            self.now += limit
            raise subprocess.TimeoutExpired("check", limit)
        self.now = end
        return 0

    def kill(self) -> None:
        self.killed = True

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("starts", "code"), [(True, 0), (False, 137)])
def test_the_clock_of_a_check_starts_with_its_last_rank(monkeypatch, tmp_path, starts, code):
    """Importing torch on every node may take longer than the check itself."""
    check = Check(starts)
    monkeypatch.setattr(job, "time", check)
    monkeypatch.setattr(job.subprocess, "Popen", check)
    monkeypatch.setattr(job.signal, "signal", lambda number, handler: None)  # of this process
    killed: list[str] = []
    monkeypatch.setattr(job, "end_steps", killed.append)
    what = job.Job(train=(), folder=tmp_path, stage=None, save_seconds=1, check=None)
    with job._Steps(what, ALLOCATION) as steps:
        assert steps.run(["check"], os.environ, limit=400, started=check.there) == code
    assert killed == ([] if starts else ["123"])
