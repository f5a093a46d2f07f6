"""`titan-loop eval`: which of its verbs runs, on which ranks it prints, and refused flags."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import titan_loop.analysis.evaluation_tables as tables
import titan_loop.evaluation.evaluate_run as evaluate_run
import titan_loop.evaluation.share_work as share_work
import titan_loop.runs.recipe_folder as recipe_folder
from titan_loop.cli import eval as cli
from titan_loop.errors import UserError
from titan_loop.evaluation import depth_report
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.runs.saved_run import SavedRun


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of an evaluation that takes no time; `rank` may be changed."""
    found: dict[str, Any] = {"rank": 0, "gains": []}

    def evaluate(path: Path, **arguments: Any) -> str:
        found.update(arguments, path=path)
        return "report"

    def gain(report: str, share: float, *, baseline: str) -> None:
        found["gains"].append((report, share, baseline))

    run = SimpleNamespace(directory=SimpleNamespace(evaluations="EVALUATIONS", path="RUN"))
    monkeypatch.setattr(evaluate_run, "evaluate_run", evaluate)
    monkeypatch.setattr(depth_report, "require_gain", gain)
    monkeypatch.setattr(share_work, "join_ranks", lambda: (found["rank"], 2))
    monkeypatch.setattr(recipe_folder, "chosen_run", lambda run, stage: run / (stage or "newest"))
    monkeypatch.setattr(tables, "depth_table", lambda report: "TABLE")
    monkeypatch.setattr(SavedRun, "open", lambda path: run)
    return found


@pytest.mark.parametrize(
    ("rank", "printed"),
    [(0, "TABLE\nThe numbers are in EVALUATIONS; titan-loop report RUN makes a page\n"), (1, "")],
)
def test_rank_zero_alone_prints_the_table(asked, capsys, rank: int, printed: str):
    asked["rank"] = rank
    cli.evaluate(Path("run"), TaskOptions(), beats_unigram=0.5)
    assert capsys.readouterr().out == printed
    assert asked["gains"] == [("report", 0.5, "unigram")]
    assert (asked["path"], asked["ema"]) == (Path("run/newest"), False)


def test_held_out_text_is_scored_at_six_depths_unless_others_are_named(asked):
    cli.evaluate(Path("run"), TaskOptions(), stage="1b")
    assert (asked["path"], asked["depths"]) == (Path("run/1b"), (1, 2, 3, 4, 5, 6))
    assert asked["gains"] == []
    cli.evaluate(Path("run"), TaskOptions(depths=(2,)), beats_unigram=0.1, beats_bigram=0.2)
    assert asked["depths"] == (2,)
    assert asked["gains"] == [("report", 0.1, "unigram"), ("report", 0.2, "bigram")]


TASKS = TaskOptions(tasks=("offline",))


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        (TaskOptions(), {"beats_unigram": 0.0}, "--beats-unigram 0.0 must lie between 0 and 1"),
        (TaskOptions(), {"beats_bigram": 1.0}, "--beats-bigram 1.0 must lie between 0 and 1"),
        (TaskOptions(), {"dense": Path("d")}, "--dense d needs --frontier, which draws it"),
        (TASKS, {"beats_bigram": 0.5}, "--beats-bigram needs held-out text: leave out --tasks"),
        (TaskOptions(), {"frontier": True, "beats_unigram": 0.5}, "--beats-unigram needs held-"),
        (TASKS, {"frontier": True, "ema": True}, "--frontier draws the weights of training"),
        (TaskOptions(limit=3), {}, "--limit 3 needs --tasks"),
    ],
)
def test_flags_that_do_not_go_together(asked, options: TaskOptions, flags: dict, message: str):
    with pytest.raises(UserError, match=message):
        cli.evaluate(Path("run"), options, **flags)
    assert "path" not in asked
