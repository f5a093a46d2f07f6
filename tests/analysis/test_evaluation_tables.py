"""Tables of evaluations, cell by cell."""

from types import SimpleNamespace
from typing import Any

from tests.analysis.test_plots import REPORT
from titan_loop.analysis.evaluation_tables import depth_table, task_table


def test_a_row_for_each_depth_and_baseline():
    assert depth_table(REPORT).splitlines() == [
        "bits per byte            code          math",
        "-------------------------------------------",
        "R = 1            2.500 ±0.100             -",
        "R = 2 (trained)  2.250 ±0.050  1.500 ±0.100",
        "unigram          3.000         2.000",
        "bigram           2.750                    -",
        "-------------------------------------------",
        "held-out bytes         12,345            99",
    ]


def result(**metrics: float) -> Any:
    return SimpleNamespace(metrics={f"{name},none": value for name, value in metrics.items()})


def test_a_column_for_each_reading_and_a_reason_for_each_task_without_a_result():
    report: Any = SimpleNamespace(
        tasks={
            "arc": {"R=1": result(acc=0.25), "R=4": result(acc=0.5, acc_stderr=0.1, acc_norm=1)},
            "own": {"R=4": result(acc=0.5, odd=1.0)},
            "mixed": {"R=1": result(acc=0.5), "R=4": result(odd=1.0)},
        },
        skipped={"held": "no text"},
        failures={"gone": "not found"},
    )
    lines = task_table(report, {"own": "odd,none"}).splitlines()
    assert [line.split() for line in (lines[0], *lines[2:])] == [
        ["task", "metric", "R=1", "R=4"],
        ["arc", "acc,none", "0.2500", "0.5000", "±0.1960"],
        ["own", "odd,none", "-", "1.0000"],
        ["mixed", "acc,none", "0.5000", "-"],
        ["skipped", "held:", "no", "text"],
        ["FAILED", "gone:", "not", "found"],
    ]
