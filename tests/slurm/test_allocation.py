"""A job as SLURM's variables describe it, and the commands and ports of its steps."""

from dataclasses import replace

import pytest

from titan_loop.errors import UserError
from titan_loop.slurm import allocation
from titan_loop.slurm.allocation import Allocation
from titan_loop.slurm.site import Site

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)
VARIABLES = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch):
    monkeypatch.setattr(allocation, "host_names", {"n[1-2]": ["n1", "n2"]}.__getitem__)


def test_a_job_is_read_from_its_variables():
    assert Allocation.current(VARIABLES) == Allocation(
        job="7", restarts=0, nodes=("n1", "n2"), ranks_per_node=8, gpus_per_node=0
    )
    again = Allocation.current({**VARIABLES, "SLURM_RESTART_COUNT": "3"})
    assert (again.restarts, again.ranks) == (3, 16)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}  # the last task of array 7
    assert Allocation.current({**VARIABLES, **array}).job == "7_2"


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, 0),
        ({"SLURM_GPUS_PER_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "2"}, 8),
        ({"SLURM_GPUS_PER_NODE": "(null)"}, 0),
    ],
)
def test_gpus_of_a_node(variables, gpus):
    assert Allocation.current({**VARIABLES, **variables}).gpus_per_node == gpus


def test_outside_of_a_job_there_is_none():
    with pytest.raises(UserError, match="slurm run is for batch scripts; use titan-loop slurm"):
        Allocation.current({"SLURM_NTASKS_PER_NODE": "8"})


def test_a_job_and_its_next_start_have_neighbouring_blocks_of_ports():
    """Job 123 has block 7 · 123 + restarts of the 240 blocks of 50 ports from 20,000 on."""
    assert ALLOCATION.port() == 20_000 + (7 * 123 + 1) % 240 * 50 == 27_100
    assert ALLOCATION.port(2) == 27_102
    assert replace(ALLOCATION, job="120_3").port() == 27_100


def test_the_command_and_environment_of_a_step():
    site = Site(container=("apptainer", "exec", "i.sif"), srun_flags=("--mpi=none",))
    command = ALLOCATION.srun(site, "train", "quickstart")
    assert command[0] == "srun"
    assert "--export=ALL" in command
    assert command[1:6] == [
        *("--nodes=3", "--ntasks=6", "--ntasks-per-node=2", "--kill-on-bad-exit=0", "--wait=40"),
    ]
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
