"""The node check on every rank: GPU, disk, and all-reduces on the node and across nodes.

Ranks begin each phase with a report on the shared disk, which shows where a rank hung or died. Sums
are compared exactly, so a link that alters data fails, too.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_loop.errors import first_line
from titan_loop.launch.health import NodeCheck
from titan_loop.launch.scheduler import PORTS_A_JOB
from titan_loop.launcher import current_task
from titan_loop.storage.json_files import write_json

# No shorter than the job waits (`job.py`): the job kills a check that hangs, and the reports then
# show the ranks that hung.
_TIMEOUT = timedelta(seconds=1200)
_SENT_FLOATS = 2**20
_ROUNDS = 3


def check_node(
    needs: NodeCheck,
    *,
    reports: Path,
    folder: Path,
    gpus: int,
    node_port: int,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Check this rank's node and write a report; faults are reported, not raised."""
    task = current_task(environment)
    assert task is not None
    rank, world_size, local_rank, local_world_size, node = task
    report: dict[str, Any] = {"node": node, "rank": rank, "problems": [], "failure": ""}
    report["clock"] = None

    def begin(phase: str) -> None:
        report["phase"] = phase
        write_json(reports / f"rank-{rank}.json", report)

    begin("start")
    report["problems"] = [
        *gpu_problems(gpus, local_rank, needs.free_memory_share),
        *disk_problems(folder, needs.free_disk_gigabytes),
        *disk_problems(Path(environment.get("TMPDIR", "/tmp")), needs.free_disk_gigabytes),
    ]
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    try:
        begin("node")
        # Each node has a port of its own: in tests, several nodes are one host.
        port = node_port + rank // local_world_size % (PORTS_A_JOB - 2)
        with _group("127.0.0.1", port, local_rank, local_world_size):
            _all_reduce()
        begin("meet")
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        with _group(address, port, rank, world_size):
            begin("all")
            _all_reduce()
            report["clock"] = time.time()  # all ranks are here at the same time
    except Exception as error:  # of any kind: the report shows it
        report["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
    begin(report["phase"])


def gpu_problems(wanted: int, local_rank: int, free_share: float) -> list[str]:
    """Return the faults of a node's GPUs."""
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
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    for _ in range(_ROUNDS):
        values = torch.full((_SENT_FLOATS,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(values)
        if not bool((values == ranks * (ranks + 1) // 2).all()):
            raise RuntimeError("an all-reduce returned a wrong sum")
