"""Finds the bad nodes in the reports that the node check's ranks wrote.

A rank rewrites its report when it begins a phase (`titan_loop.launch.node_check`): its own checks
("start"), the all-reduce on its node ("node"), meeting all ranks ("meet"), the all-reduce across
all nodes ("all"). So the report of a rank that hangs or dies shows its last phase.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.launch.scheduler import Allocation
from titan_loop.storage.json_files import read_json_object

_CLOCK_SKEW_SECONDS = 5.0
_Reports = dict[str, list[dict[str, Any]]]


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
    found: _Reports = {node: [] for node in allocation.nodes}
    for path in sorted(reports.glob("rank-*.json")):
        report = read_json_object(path, fix="start the job again")
        found.setdefault(report["node"], []).append(report)
    # Own faults first: good nodes fail, too, for want of the ranks on bad ones.
    own = {node: _own_fault(part, allocation.ranks_per_node) for node, part in found.items()}
    bad = {node: fault for node, fault in own.items() if fault} or _apart(found) or _skewed(found)
    if bad:
        return bad, []
    unfinished = [r for part in found.values() for r in part if r["clock"] is None or r["failure"]]
    return {}, sorted({r["failure"] or "the all-reduce of all nodes hung" for r in unfinished})


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


def _apart(found: _Reports) -> dict[str, str]:
    return {
        node: f"rank {report['rank']} did not reach rank 0: {report['failure'] or 'it hung'}"
        for node, reports in found.items()
        for report in reports
        if report["phase"] == "meet"
    }


def _skewed(found: _Reports) -> dict[str, str]:
    """Return the nodes whose clock is off the median, or off the first one's if there are two."""
    clocks = {
        node: min(report["clock"] for report in reports)
        for node, reports in found.items()
        if reports and all(report["clock"] is not None for report in reports)
    }
    times = list(clocks.values())
    reference = statistics.median(times) if len(times) > 2 else next(iter(times), 0.0)
    return {
        node: f"its clock is {clock - reference:+.1f} s off"
        for node, clock in clocks.items()
        if abs(clock - reference) > _CLOCK_SKEW_SECONDS
    }
