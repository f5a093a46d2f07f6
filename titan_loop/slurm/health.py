"""The verdict of the node check: which nodes are bad, from what their ranks reported.

A rank writes its report anew at every phase (`titan_loop.slurm.node_check`), so one that hangs or
dies leaves how far it came.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_loop.slurm.allocation import Allocation

PHASES = ("start", "node", "meet", "all")
"""What a rank has begun: its own checks, the all-reduce of its node, meeting all ranks, the
all-reduce of all."""

_CLOCK_SKEW_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheck:
    """What is required of every node.

    Attributes:
        free_disk_gigabytes: In the recipe's folder and in TMPDIR, 10⁹ bytes.
        free_memory_share: Of every GPU's memory.
    """

    free_disk_gigabytes: float = 1.0
    free_memory_share: float = 0.9

    def command(self, reports: Path, allocation: Allocation, folder: Path) -> list[str]:
        """Return what follows `titan-loop` on every rank."""
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


def bad_nodes(
    reports: Path, allocation: Allocation, check: NodeCheck
) -> tuple[dict[str, str], list[str]]:
    """Return node → what is wrong with it, and what is wrong with no node in particular.

    Args:
        reports: The folder the ranks reported to.
        allocation: Which nodes and how many ranks there should be.
        check: What was required.
    """
    found: dict[str, list[dict[str, Any]]] = {node: [] for node in allocation.nodes}
    for path in sorted(reports.glob("rank-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(report["node"], []).append(report)
    bad = {node: reason for node in found if (reason := _reason(found[node], allocation))}
    if not bad:
        bad = _skewed(found)
    failures = {report["failure"] for node in found for report in found[node] if report["failure"]}
    # What ranks of good nodes complain about is the absence of the bad ones.
    return bad, [] if bad else sorted(failures)


def _reason(reports: list[dict[str, Any]], allocation: Allocation) -> str:
    """Return why a node's own reports make it bad; empty if they do not."""
    problems = sorted({problem for report in reports for problem in report["problems"]})
    if problems:
        return "; ".join(problems)
    if len(reports) < allocation.ranks_per_node:
        return f"{len(reports)} of {allocation.ranks_per_node} ranks started"
    for report in reports:
        if report["phase"] == "start":
            return f"rank {report['rank']} hung in its own checks"
        if report["phase"] in ("node", "meet"):
            what = "the all-reduce on its node" if report["phase"] == "node" else "reaching rank 0"
            return f"rank {report['rank']} failed at {what}: {report['failure'] or 'it hung'}"
    return ""


def _skewed(found: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the nodes whose clock is off; of two nodes that differ, the second."""
    clocks = {
        node: min(report["clock"] for report in reports)
        for node, reports in found.items()
        if reports and all(report["clock"] is not None for report in reports)
    }
    if not clocks:
        return {}
    several = len(clocks) > 2
    reference = statistics.median(clocks.values()) if several else next(iter(clocks.values()))
    return {
        node: f"its clock is {clock - reference:+.1f} s off"
        for node, clock in clocks.items()
        if abs(clock - reference) > _CLOCK_SKEW_SECONDS
    }
