"""The table of a run's decisions about spikes, from `decisions.jsonl`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def decision_rows(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each record of `RunDirectory.read_decisions`, header first."""
    rows = [["step", "windows", "loss (at most)", "gradient norm (at most)", "then"]]
    for record in records:
        then = {
            "skip": "update skipped",
            "stop": "stopped, exit code 4",
            "rewind": f"back to step {record.get('to_step')}, over these windows",
        }
        decision = str(record["decision"])
        windows = ", ".join(f"{first}–{stop - 1}" for first, stop in record["windows"])
        measured = [_against(record, name) for name in ("loss", "grad_norm")]
        rows.append([str(record["step"]), windows, *measured, then.get(decision, decision)])
    return rows


def count_decisions(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers of skipped spikes and of rewinds, as a phrase; empty without any."""
    counts = Counter(record["decision"] for record in records)
    called = {"skip": "spikes skipped", "rewind": "rewinds"}
    return ", ".join(f"{counts[kind]} {name}" for kind, name in called.items() if counts[kind])


def _against(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return ""
    value, bound = record[name], record.get(f"{name}_bound")
    shown = "not finite" if value is None else f"{value:.3g}"
    return shown if bound is None else f"{shown} ({bound:.3g})"
