"""`titan-loop eval`: which of its verbs runs, on which ranks it prints, and refused flags."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import titan_loop.analysis.evaluation_tables as tables
import titan_loop.evaluation.evaluate_run as evaluate_run
import titan_loop.evaluation.share_work as share_work
import titan_loop.runs.recipe_folder as recipe_folder
from titan_loop.cli import eval as cli
from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation import depth_report, evaluate_tasks, watch
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.runs.saved_run import SavedRun


@pytest.mark.parametrize(
    ("words", "verb", "rest"),
    [
        (["watch", "runs/my"], "eval watch", ["runs/my"]),
        (["runs/my", "watch"], "eval", ["runs/my", "watch"]),
        (["watched", "--ema"], "eval", ["watched", "--ema"]),
        (["watch"], "eval watch", []),
        ([], "eval", []),
    ],
)
def test_the_first_word_may_be_watch(
    monkeypatch: pytest.MonkeyPatch, words: list[str], verb: str, rest: list[str]
):
    called: list[tuple[str, object, Sequence[str]]] = []

    def command(name: str) -> Any:
        return lambda function: lambda given: called.append((name, function, given)) or 3

    monkeypatch.setattr(cli, "command", command)
    assert cli.run(words) == 3
    assert called == [(verb, cli.watch if verb == "eval watch" else cli.evaluate, rest)]


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


@pytest.mark.parametrize(("rank", "printed"), [(0, "TASKS\nThe report is REPORT\n"), (1, "")])
def test_rank_zero_prints_tasks_and_all_fail_with_a_task(
    asked, monkeypatch: pytest.MonkeyPatch, capsys, rank: int, printed: str
):
    asked["rank"] = rank
    report = SimpleNamespace(failures={}, path=lambda directory: "REPORT")
    monkeypatch.setattr(evaluate_tasks, "evaluate_tasks", lambda *given, **flags: report)
    monkeypatch.setattr(tables, "task_table", lambda report, metrics: "TASKS")
    cli.evaluate(Path("run"), TASKS)
    assert capsys.readouterr().out == printed
    report.failures = {"a": "why", "b": "why"}
    with pytest.raises(RunFailedError, match=r"2 tasks have no result: a, b \(why: above\)"):
        cli.evaluate(Path("run"), TASKS)


@pytest.mark.parametrize("incomplete", [[], [4, 8]])
def test_a_watcher_names_the_steps_without_a_result(
    monkeypatch: pytest.MonkeyPatch, incomplete: list[int]
):
    made: list[Any] = []

    class Watcher:
        def __init__(self, run: Path, options: TaskOptions, **flags: bool) -> None:
            self.incomplete = incomplete
            made.append(flags)

        def run(self, **flags: Any) -> None:
            made.append(flags)

    monkeypatch.setattr(watch, "Watcher", Watcher)
    if incomplete:
        with pytest.raises(RunFailedError, match=r"run: steps 4, 8 lack results \(why: above\)"):
            cli.watch(Path("run"), TaskOptions())
    else:
        cli.watch(Path("run"), TaskOptions())
    assert made == [{"wandb": False, "retry": False}, {"once": False, "interval_seconds": 60.0}]
