"""Points of a frontier: intervals, times, and a dense model beside them."""

from pathlib import Path

import pytest

from titan_loop.analysis.frontier import (
    dense_points,
    frontier_points,
    frontier_table,
    write_frontier,
)
from titan_loop.errors import UserError
from titan_loop.evaluation.task_report import SECONDS, ReadingResult, TaskReport, interval
from titan_loop.runs.run_directory import RunDirectory


def report_of(tasks: dict[str, dict[str, ReadingResult]], steps: int = 4) -> TaskReport:
    return TaskReport(
        step=7,
        tokens=70,
        trained_recurrent_steps=steps,
        manifest_sha256=f"{steps}",
        tasks=tasks,
        settings=dict.fromkeys(tasks, "windows=4"),
    )


def bits(value: float, seconds: float | None = None, steps: float = 4.0) -> ReadingResult:
    metrics = {
        "bits_per_byte": value,
        "bits_per_byte_low": value - 0.1,
        "bits_per_byte_high": value + 0.2,
    }
    if seconds is not None:
        metrics[SECONDS] = seconds
    return ReadingResult(metrics=metrics, mean_steps=steps)


def text_report() -> TaskReport:
    readings = {
        "static:4": bits(2.0, 0.004),
        "margin:0.1": bits(2.1, 0.003, 3.0),
        "contrast:1,0.5,0.1": bits(1.9, 0.005),
    }
    return report_of({"held_out/code": readings})


def test_intervals_are_those_of_the_metric_or_of_its_standard_error():
    assert interval(bits(2.0).metrics, "bits_per_byte") == pytest.approx((2.0, 1.9, 2.2))
    exam = {"acc,none": 0.5, "acc_stderr,none": 0.05}
    assert interval(exam, "acc,none") == pytest.approx((0.5, 0.402, 0.598))
    assert interval({"acc,none": 0.5}, "acc,none") == (0.5, 0.5, 0.5)


def test_points_carry_intervals_and_measured_seconds(tmp_path: Path):
    points = frontier_points(text_report())
    assert [point.policy for point in points] == ["static", "margin", "contrast"]
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
    asked.settings["held_out/code"] = "windows=8"
    with pytest.raises(UserError, match="evaluated on none of held_out/code with the same setting"):
        dense_points(asked, tmp_path / "dense")
    with pytest.raises(UserError, match="nowhere was not evaluated on tasks; run titan-loop"):
        dense_points(asked, tmp_path / "nowhere")
