"""The node check: every rank reports on its node, and the job finds the bad nodes in the reports.

A rank rewrites its report on the shared disk when it begins a phase: its own checks ("start"), the
all-reduce on its node ("node"), meeting all ranks ("meet"), the all-reduce across all nodes
("all"), the end ("done"). So the report of a rank that hangs or dies shows its last phase. Sums are
compared exactly, so a link that alters data fails, too.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from titan_loop.errors import first_line
from titan_loop.launch.scheduler import PORTS_A_JOB, Allocation
from titan_loop.launcher import current_task
from titan_loop.storage.json_files import read_json_object, write_json

# No shorter than the job waits (`job.py`): the job kills a check that hangs, and the reports then
# show the ranks that hung.
_TIMEOUT = timedelta(seconds=1200)
_SENT_FLOATS = 2**20
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheck:
    """Requirements of every node.

    Attributes:
        free_disk_gigabytes: Free space in the recipe's folder and in TMPDIR, in 10⁹ bytes.
        free_memory_share: Free share of the memory of every GPU, from 0 to 1.
    """

    free_disk_gigabytes: float = 1.0
    free_memory_share: float = 0.9

    def command(self, reports: Path, allocation: Allocation, folder: Path) -> list[str]:
        """Return the arguments of `titan-loop` on every rank."""
        return [
            "slurm",
            "check-node",
            f"--reports={reports}",
            f"--folder={folder}",
            f"--gpus={allocation.gpus_per_node}",
            f"--node-port={allocation.port(2)}",
            f"--free-disk-gigabytes={self.free_disk_gigabytes}",
            f"--free-memory-share={self.free_memory_share}",
        ]


def bad_nodes(reports: Path, allocation: Allocation) -> tuple[dict[str, str], list[str]]:
    """Return node → its fault, and the faults that no single node explains."""
    found: dict[str, list[dict[str, Any]]] = {node: [] for node in allocation.nodes}
    for path in sorted(reports.glob("rank-*.json")):
        report = read_json_object(path, fix="start the job again")
        found.setdefault(report["node"], []).append(report)
    # Own faults first: good nodes fail, too, for want of the ranks on bad ones.
    own = {node: _own_fault(part, allocation.ranks_per_node) for node, part in found.items()}
    every = [report for part in found.values() for report in part]
    apart = {
        each["node"]: f"rank {each['rank']} did not reach rank 0: {each['failure'] or 'it hung'}"
        for each in every
        if each["phase"] == "meet"
    }
    if bad := {node: fault for node, fault in own.items() if fault} or apart:
        return bad, []
    faults = {report["failure"] for report in every if report["phase"] != "done"}
    return {}, sorted(fault or "the all-reduce of all nodes hung" for fault in faults)


def _own_fault(reports: list[dict[str, Any]], ranks: int) -> str:
    if problems := sorted({problem for report in reports for problem in report["problems"]}):
        return "; ".join(problems)
    if len(reports) < ranks:
        return f"{len(reports)} of {ranks} ranks started"
    for report in reports:
        if report["phase"] == "start":
            return f"rank {report['rank']} hung in its own checks"
        if report["phase"] == "node":
            why = report["failure"] or "it hung"
            return f"rank {report['rank']} failed at the all-reduce on its node: {why}"
    return ""


def check_node(needs: NodeCheck, *, reports: Path, folder: Path, gpus: int, node_port: int) -> None:
    """Check this rank's node and write a report; faults are reported, not raised."""
    import torch  # the job, which reads the reports, does without

    task = current_task()
    assert task is not None
    report = {"node": task.node, "rank": task.rank, "problems": [], "failure": ""}

    def begin(phase: str) -> None:
        report["phase"] = phase
        write_json(reports / f"rank-{task.rank}.json", report)

    begin("start")
    report["problems"] = [
        *gpu_problems(gpus, task.local_rank, needs.free_memory_share),
        *disk_problems(folder, needs.free_disk_gigabytes),
        *disk_problems(Path(os.environ.get("TMPDIR", "/tmp")), needs.free_disk_gigabytes),
    ]
    if task.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(task.local_rank)
    try:
        begin("node")
        # Each node has a port of its own: in tests, several nodes are one host.
        port = node_port + task.rank // task.local_world_size % (PORTS_A_JOB - 2)
        with _group("127.0.0.1", port, task.local_rank, task.local_world_size):
            _all_reduce()
        begin("meet")
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with _group(address, port, task.rank, task.world_size):
            begin("all")
            _all_reduce()
        begin("done")
    except Exception as error:  # of any kind: the report shows it
        report["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
        begin(report["phase"])


def gpu_problems(wanted: int, local_rank: int, free_share: float) -> list[str]:
    """Return the faults of a node's GPUs."""
    import torch

    if wanted == 0:
        return []
    if (count := torch.cuda.device_count()) != wanted:
        return [f"{count} of {wanted} GPUs are there"]
    try:
        free, total = torch.cuda.mem_get_info(local_rank)
    except RuntimeError as error:
        return [f"GPU {local_rank} does not answer: {first_line(error)}"]
    if free < free_share * total:
        gib = 2**30
        return [f"GPU {local_rank} has {free / gib:.1f} of {total / gib:.1f} GiB free"]
    return []


def disk_problems(folder: Path, gigabytes: float) -> list[str]:
    """Return the reasons why a run could not write into `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"titan_loop")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [f"{folder} cannot be written ({error.strerror})"]
    if free < gigabytes * 1e9:
        return [f"{folder} has {free / 1e9:.1f} GB free, {gigabytes:g} are needed"]
    return []


@contextmanager
def _group(address: str, port: int, rank: int, world_size: int) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, world_size, rank == 0, _TIMEOUT
    )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _all_reduce() -> None:
    """Add up 4 MiB a few times; raise `RuntimeError` unless the sums are exact."""
    import torch
    import torch.distributed as dist

    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    for _ in range(_ROUNDS):
        values = torch.full((_SENT_FLOATS,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(values)
        if not bool((values == ranks * (ranks + 1) // 2).all()):
            raise RuntimeError("an all-reduce returned a wrong sum")
