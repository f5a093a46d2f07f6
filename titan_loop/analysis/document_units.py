"""Held-out text in a run's result: names of its readings, and sums per document.

Documents are the units that two runs are compared on; a result has their sums as texts of numbers.
"""

from collections.abc import Sequence

from titan_loop.evaluation.depth_report import DepthReport
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.runs.run_directory import RunDirectory


def depth_reports(run: RunDirectory) -> list[DepthReport]:
    """Return a run's depth reports, on its weights and on their average."""
    return [DepthReport.load(path) for path in run.evaluations.glob("depth-*step-*.json")]


def held_out_name(report: DepthReport, source: str, depth: int, end: str = "") -> str:
    """Return TASK/METRIC/READING of a source at a depth, or of its interval's `_low` or `_high`."""
    return f"{HELD_OUT}/{source}/bits_per_byte{end}/static:{depth}{',ema' if report.ema else ''}"


def units_of(run: RunDirectory) -> dict[str, list[str]]:
    """Return the content of `RunResult.units`, of the newest step with a depth report."""
    reports = depth_reports(run)
    newest = max((report.step for report in reports), default=0)
    return {
        held_out_name(report, source, depth): [" ".join(map(str, sums)) for sums in (n_bytes, nats)]
        for report in reports
        if report.step == newest
        for source, depths in report.sources.items()
        for n_bytes in [depths.units.n_bytes]
        for depth, nats in depths.units.nats.items()
    }


def numbers(texts: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the bytes and the nats that `units_of` wrote; raise `ValueError` for other texts."""
    n_bytes, nats = ([float(word) for word in text.split()] for text in texts)
    if len(n_bytes) != len(nats):
        raise ValueError(f"{len(n_bytes)} documents have bytes and {len(nats)} nats")
    return n_bytes, nats
