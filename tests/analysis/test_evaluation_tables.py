"""Tables of evaluations, cell by cell."""

from types import SimpleNamespace
from typing import Any

from titan_loop.analysis.evaluation_tables import depth_rows, depth_table, task_rows, task_table
from titan_loop.evaluation.intervals import Interval

TEXT = SimpleNamespace(
    depths={1: Interval(2.0, 1.9, 2.3), 4: Interval(1.5, 1.25, 1.75)},
    baselines={"unigram": 3.0},
    n_bytes=12_345,
)
CODE = SimpleNamespace(
    depths={4: Interval(1.0, 1.0, 1.0)}, baselines={"bigram": 2.5, "unigram": 3.5}, n_bytes=9
)
DEPTHS: Any = SimpleNamespace(sources={"text": TEXT, "code": CODE}, trained_recurrent_steps=4)


def test_a_row_for_each_depth_and_baseline():
    assert depth_rows(DEPTHS) == [
        ["bits per byte", "text", "code"],
        ["R = 1", "2.000 ±0.200", "-"],
        ["R = 4 (trained)", "1.500 ±0.250", "1.000 ±0.000"],
        ["unigram", "3.000       ", "3.500       "],
        ["bigram", "-", "2.500       "],
        ["held-out bytes", "12,345", "9"],
    ]


def test_a_rule_stands_above_the_bytes():
    lines = depth_table(DEPTHS).splitlines()
    assert len(lines) == 8
    assert set(lines[1]) == {"-"}
    assert lines[6] == lines[1]
    assert lines[7].startswith("held-out bytes")
    assert lines[5].startswith("bigram")


def result(**metrics: float) -> Any:
    return SimpleNamespace(metrics={f"{name},none": value for name, value in metrics.items()})


TASKS: Any = SimpleNamespace(
    tasks={
        "arc": {"R=1": result(acc=0.25), "R=4": result(acc=0.5, acc_stderr=0.1, acc_norm=0.75)},
        "other": {"R=4": result(odd=1.0)},
        "mixed": {"R=1": result(acc=0.5), "R=4": result(odd=1.0)},
    },
    skipped={"held": "no text"},
    failures={"gone": "not found"},
)


def test_a_column_for_each_reading():
    assert task_rows(TASKS, ["R=1", "R=4"]) == [
        ["task", "metric", "R=1", "R=4"],
        ["arc", "acc,none", "0.2500", "0.5000 ±0.1960"],
        ["other", "odd,none", "-", "1.0000"],
        ["mixed", "acc,none", "0.5000", "-"],
    ]


def test_a_suites_metric_is_preferred():
    (row,) = task_rows(
        SimpleNamespace(tasks={"arc": {"R": result(acc=0.5, odd=0.75)}}),  # pyright: ignore
        ["R"],
        {"arc": "odd,none"},
    )[1:]
    assert row == ["arc", "odd,none", "0.7500"]


def test_tasks_without_a_result_follow_with_the_reason():
    lines = task_table(TASKS, {}).splitlines()
    assert lines[0].split() == ["task", "metric", "R=1", "R=4"]
    assert lines[-2:] == ["skipped held: no text", "FAILED gone: not found"]
    nothing: Any = SimpleNamespace(tasks={}, skipped={}, failures={"gone": "not found"})
    assert task_table(nothing, {}) == "FAILED gone: not found"
