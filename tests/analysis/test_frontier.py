"""Tables and plots of evaluations: a frontier's points, depths, readings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_loop.analysis import frontier
from titan_loop.analysis.evaluation_tables import task_table
from titan_loop.analysis.frontier import frontier_points, frontier_table, write_frontier
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.runs.run_directory import RunDirectory


def report_of(tasks: dict[str, dict[str, ReadingResult]], **lacking: Any) -> TaskReport:
    return TaskReport(
        step=7, tokens=70, trained_recurrent_steps=4, manifest_sha256="a", tasks=tasks, **lacking
    )


def bits(value: float, steps: float | None = 4.0) -> ReadingResult:
    metrics = {
        "bits_per_byte": value,
        "bits_per_byte_low": value - 0.1,
        "bits_per_byte_high": value + 0.1,
    }
    return ReadingResult(metrics=metrics, mean_steps=steps)


def test_points_are_ordered_by_task_policy_and_steps_and_lone_policies_left_out():
    readings = {
        "static:4": bits(2.0),
        "own:1": bits(2.0, steps=2.0),
        "kl:0.2": bits(2.0, steps=3.0),
        "kl:0.1": bits(2.0, steps=1.5),
        "static:1": bits(3.0, steps=1.0),
        "margin:1": ReadingResult(metrics={}, mean_steps=1.0),
        "unigram": bits(5.0, steps=None),
    }
    alone = {"static:1": bits(1.0), "static:2": bits(1.0), "unigram": bits(5.0, steps=None)}
    points = frontier_points(report_of({"b": readings, "a": readings, "alone": alone}))
    order = ["static:1", "static:4", "kl:0.1", "kl:0.2", "own:1"]
    assert [(p.task, p.reading) for p in points] == [(task, r) for task in "ab" for r in order]
    assert (points[1].low, points[1].high) == pytest.approx((1.9, 2.1))
    table = frontier_table(report_of({"b": readings, "a": readings, "alone": alone}))
    assert "1.9000 to 2.1000" in table.splitlines()[3]


@pytest.mark.parametrize(
    ("metric", "best", "steps"), [("bits_per_byte", "q:1", "3.00"), ("acc", "static:4", "4.00")]
)
def test_the_best_reading_is_the_title_and_of_equals_the_one_with_fewer_steps(
    metric, best, steps, tmp_path: Path, monkeypatch
):
    values = {"static:4": (2.0, 4.0), "q:1": (1.0, 3.0), "q:2": (1.0, 3.5), "q:3": (2.0, 4.5)}
    readings = {
        name: ReadingResult(metrics={metric: value}, mean_steps=mean)
        for name, (value, mean) in values.items()
    }
    other = {name: replace(result, mean_steps=1.0) for name, result in readings.items()}
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        frontier, "plot_frontier", lambda points, path, **given: drawn.update(given) or path
    )
    assert write_frontier(report_of({"t": readings, "u": other}), RunDirectory(tmp_path))
    assert drawn == {"title": f"t: {best} is best, with {steps} steps on average"}
    lone = report_of({"t": {"static:4": bits(1.0)}})
    assert write_frontier(lone, RunDirectory(tmp_path)) is None


def test_tasks_have_a_column_for_each_reading_and_a_reason_where_they_lack_a_result():
    def result(**metrics: float) -> ReadingResult:
        return ReadingResult(metrics={f"{name},none": value for name, value in metrics.items()})

    report = report_of(
        {
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
