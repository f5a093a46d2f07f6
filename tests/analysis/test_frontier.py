"""Points of a frontier: intervals, times, and a dense model beside them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_loop.analysis import frontier
from titan_loop.analysis.frontier import (
    dense_points,
    frontier_points,
    frontier_table,
    write_frontier,
)
from titan_loop.errors import UserError
from titan_loop.evaluation.task_report import SECONDS, ReadingResult, TaskReport
from titan_loop.runs.run_directory import RunDirectory


def report_of(tasks: dict[str, dict[str, ReadingResult]], steps: int = 4) -> TaskReport:
    return TaskReport(
        step=7,
        tokens=70,
        trained_recurrent_steps=steps,
        manifest_sha256=f"{steps}",
        tasks=tasks,
    )


def bits(value: float, seconds: float | None = None, steps: float = 4.0) -> ReadingResult:
    metrics = {
        "bits_per_byte": value,
        "bits_per_byte_low": value - 0.1,
        "bits_per_byte_high": value + 0.2,
    }
    if seconds is not None:
        metrics[SECONDS] = seconds
    return ReadingResult(metrics=metrics, mean_steps=steps, settings="windows=4")


def text_report() -> TaskReport:
    readings = {
        "static:4": bits(2.0, 0.004),
        "margin:0.1": bits(2.1, 0.003, 3.0),
        "kl:1,0.5": bits(1.9, 0.005),
    }
    return report_of({"held_out/code": readings})


def test_points_carry_intervals_and_measured_seconds(tmp_path: Path):
    points = frontier_points(text_report())
    assert [point.policy for point in points] == ["static", "margin", "kl"]
    assert [point.seconds for point in points] == [0.004, 0.003, 0.005]
    assert (points[1].low, points[1].high) == pytest.approx((2.0, 2.3))
    lines = frontier_table(points).splitlines()
    assert "3.00" in lines[-2]
    assert "2.0000 to 2.3000" in lines[-2]
    written = write_frontier(text_report(), RunDirectory(tmp_path))
    assert written is not None
    assert written.png.exists()


def test_a_dense_run_is_read_at_its_own_r_where_it_was_asked_the_same(tmp_path: Path):
    other = report_of({"held_out/code": {"static:1": bits(2.2), "static:2": bits(3.0)}}, steps=1)
    other.save(RunDirectory(tmp_path / "dense"))
    (point,) = dense_points(text_report(), tmp_path / "dense").values()
    assert (point.reading, point.value) == ("static:1", 2.2)
    drawn = write_frontier(text_report(), RunDirectory(tmp_path / "run"), tmp_path / "dense")
    assert drawn is not None
    asked = text_report()
    for result in asked.tasks["held_out/code"].values():
        result.settings = "windows=8"
    with pytest.raises(UserError, match="evaluated on none of held_out/code with the same setting"):
        dense_points(asked, tmp_path / "dense")
    with pytest.raises(UserError, match="nowhere was not evaluated on tasks; run titan-loop"):
        dense_points(asked, tmp_path / "nowhere")


def test_points_are_ordered_by_task_policy_and_steps_and_lone_policies_left_out():
    readings = {
        "static:4": bits(2.0),
        "own:1": bits(2.0, steps=2.0),
        "kl:0.2": bits(2.0, steps=3.0),
        "kl:0.1": bits(2.0, steps=1.5),
        "static:1": bits(3.0, steps=1.0),
        "margin:1": ReadingResult(metrics={}, mean_steps=1.0),
        "margin:2": ReadingResult(metrics={"acc": 1.0}, mean_steps=None),
    }
    alone = {"static:1": bits(1.0), "static:2": bits(1.0)}
    points = frontier_points(report_of({"b": readings, "a": readings, "alone": alone}))
    order = ["static:1", "static:4", "kl:0.1", "kl:0.2", "own:1"]
    assert [(p.task, p.reading) for p in points] == [(task, r) for task in "ab" for r in order]


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
    written = write_frontier(report_of({"t": readings, "u": other}), RunDirectory(tmp_path))
    assert written is not None
    assert drawn == {"title": f"t: {best} is best, with {steps} steps on average", "dense": None}
    header, *rows = written.csv.read_text().splitlines()
    assert header == "task,metric,policy,reading,mean_steps,value,low,high,seconds"
    assert len(rows) == 8
    assert rows[0] == f"t,{metric},static,static:4,4.0,2.0,2.0,2.0,"
    lone = report_of({"t": {"static:4": bits(1.0)}})
    assert write_frontier(lone, RunDirectory(tmp_path)) is None
