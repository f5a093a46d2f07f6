"""The table of a run's decisions about spikes, from `decisions.jsonl`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def decision_rows(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each of `RunDirectory.read_decisions`, header first."""
    rows = [
        ["step", "windows", "loss (at most)", "gradient norm (at most)", "began in the", "then"]
    ]
    for record in records:
        windows = ", ".join(f"{first}–{stop - 1}" for first, stop in record["windows"])
        rows.append(
            [
                str(record["step"]),
                windows,
                _against(record, "loss"),
                _against(record, "grad_norm"),
                str(record.get("began", "")),
                _then(record),
            ]
        )
    return rows


def count_decisions(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many spikes were skipped and how often the run went back; empty for never."""
    counts = Counter(record["decision"] for record in records)
    parts = [f"{counts['skip']} spikes skipped"] if counts["skip"] else []
    if counts["rewind"]:
        parts.append(f"{counts['rewind']} rewinds")
    return ", ".join(parts)


def _against(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return ""
    value, bound = record[name], record.get(f"{name}_bound")
    shown = "not finite" if value is None else f"{value:.3g}"
    return shown if bound is None else f"{shown} ({bound:.3g})"


def _then(record: Mapping[str, Any]) -> str:
    return {
        "skip": "update skipped",
        "rewind": f"back to step {record.get('to_step')}, over these windows",
        "stop": "stopped, exit code 4",
    }.get(record["decision"], str(record["decision"]))
