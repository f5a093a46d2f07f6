"""REPRODUCE.md agrees with the results, and its verdicts follow from intervals over seeds."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_loop.analysis.results import RunResult
from titan_loop.errors import UserError
from tools.reproduce import numbers, page, row, verdict
from train_configs.claims import Cell, Claim

CLAIM = Claim(
    paper="–",
    text="first over second",
    theirs="",
    recipe="test",
    cells=[Cell(stage="first", name="acc"), Cell(stage="second", name="acc")],
    at_least=10,
    command="true",
)


def result(stage: str, seed: int, value: float) -> RunResult:
    return RunResult(
        recipe="test", stage=stage, seed=seed, overrides=[], commit=None, machine="", versions={},
        tokens=1, steps=1, seconds=60.0, losses=[[1, 1.0]], results={"acc": value},
    )  # fmt: skip


def test_the_committed_page_is_current():
    committed = Path("train_configs/REPRODUCE.md").read_text().splitlines()
    stale = set(page().splitlines()) - set(committed)  # less than all where a family was deleted
    assert not stale, "run python -m tools.reproduce and commit REPRODUCE.md"


def test_differences_are_paired_by_seed():
    results = [result("first", seed, 0.5 + seed / 10) for seed in (1, 2, 3)]
    results += [result("second", seed, seed / 10) for seed in (2, 3, 4)]
    assert numbers(CLAIM, results) == pytest.approx({2: 50.0, 3: 50.0})


def test_runs_on_different_documents_are_not_compared():
    first, second = (result(stage, 1, 0.5) for stage in ("first", "second"))
    units = {"acc": ["10 20", "1.5 2.5"]}
    results = [replace(first, units=units), replace(second, units={"acc": ["10 20", "3.5 1.5"]})]
    assert numbers(CLAIM, results) == {1: 0.0}
    results[1] = replace(second, units={"acc": ["10 21", "1.5 2.5"]})
    with pytest.raises(UserError, match="test: first over second: its runs were scored on differ"):
        numbers(CLAIM, results)


def test_cells_may_be_chosen_by_the_results_and_be_none_yet():
    cells = list(CLAIM.cells)
    claim = replace(CLAIM, cells=lambda results: cells if len(results) == 2 else [])
    results = [result("first", 1, 0.5), result("second", 1, 0.25)]
    assert numbers(claim, results) == {1: 25.0}
    assert row(claim, results).split(" | ")[6] == "2"  # minutes of both runs
    assert numbers(claim, results[:1]) == {}


def test_three_cells_are_the_share_of_a_gap():
    claim = replace(CLAIM, cells=[*CLAIM.cells, Cell(stage="third", name="acc")])
    results = [
        result(stage, seed, value)
        for seed, second in ((1, 1.5), (2, 1.0))
        for stage, value in {"first": 3.0, "second": second, "third": 1.0}.items()
    ]
    assert numbers(claim, results) == {1: 75.0, 2: 100.0}
    assert "87.5 [-71.3, 246.3]" in row(claim, results)  # it may lie beyond both ends


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([20.0], "partly"),
        ([19.0, 20.0], "partly"),
        ([19.0, 20.0, 21.0], "**shown**"),
        ([5.0, 20.0, 21.0], "partly, undecided"),
        ([5.0, 6.0, 7.0], "not"),
        ([1.0, 6.0, 20.0], "not, undecided"),
    ],
)
def test_a_claim_is_shown_by_three_seeds_whose_interval_meets_the_aim(values, expected):
    assert verdict(CLAIM, values) == expected
    assert verdict(replace(CLAIM, at_least=None, at_most=8.0), [5.0, 5.1, 5.2]) == "**shown**"
