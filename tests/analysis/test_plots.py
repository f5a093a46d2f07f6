"""Plots: drawn from a run directory alone, also from awkward ones."""

import math
from pathlib import Path
from typing import Any

import pytest

from titan_loop.analysis.report import plot_run
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.evaluation.evals_log import (
    WHILE_TRAINING,
    append_evaluation,
    held_out_while_training,
)
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl, read_jsonl


def scored(*depths: int) -> TaskReport:
    """Held-out text at depths: two documents, whose bits per byte differ more than depths do."""
    bits = {1: 2.5, 2: 2.25}
    readings = {
        f"static:{depth}": ReadingResult(
            metrics={"bits_per_byte": bits[depth]},
            mean_steps=depth,
            units=["100 100", f"{100 * bits[depth] * math.log(2) - 50} "
                   f"{100 * bits[depth] * math.log(2) + 50}"],
        )
        for depth in depths
    }  # fmt: skip
    return TaskReport(
        step=30,
        tokens=30_000,
        trained_recurrent_steps=2,
        manifest_sha256="ab",
        tasks={"held_out/code": readings},
    )


def write_metrics(run: RunDirectory, steps: int, *, gate: bool = True) -> None:
    for step in range(1, steps + 1):
        recurrent_steps = 1 if step < 5 else 2  # R grows while training
        record: dict[str, float | None] = {"step": step, "tokens": 1000 * step, "loss": 3.0}
        record["recurrent_steps"] = recurrent_steps
        for r in range(1, recurrent_steps + 1):
            record[f"ce/step_{r}"] = 5 * math.exp(-step / 10) + 1 / r
            if gate:
                record[f"exit/pmf_{r}"] = 1 / recurrent_steps
        if gate:
            record["exit/mean_step"] = (recurrent_steps + 1) / 2
            record["exit/entropy_nats"] = 0.5 if step != 6 else None
        if step == 7:
            record["ce/step_1"] = math.nan
        append_jsonl(run.metrics_jsonl, record)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be written."""
    figures: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure)
    )
    return figures


def write_held_out(run: RunDirectory) -> None:
    """Steps 1 and 2, then 2 again and 3, beside a task that is not held-out text."""
    for step, bits in ((1, 9.0), (2, 9.0), (2, 1.5), (3, 1.5)):
        result = ReadingResult(
            metrics={"bits_per_byte": bits, "nats_per_token": 2.5}, mean_steps=4.0
        )
        diverged = ReadingResult(metrics={"bits_per_byte": math.nan}, mean_steps=8.0)
        readings = {"static:4": result, "static:8": diverged}
        append_evaluation(
            run,
            TaskReport(
                step=step, tokens=1000 * step, trained_recurrent_steps=4, manifest_sha256="",
                tasks={"held_out/a/b": readings, "mano": {"static:4": result}},
            ),
            asked=WHILE_TRAINING, seconds=0.0,
        )  # fmt: skip


def test_held_out_text_while_training_is_read_from_the_log(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert held_out_while_training(run) == []
    write_held_out(run)
    watched = TaskReport(step=9, tokens=9, trained_recurrent_steps=4, manifest_sha256="ab")
    append_evaluation(run, watched, asked="a watcher's questions", seconds=0.0)
    assert held_out_while_training(run) == [
        (1000, {"a/b": {4: 9.0}}),
        (2000, {"a/b": {4: 1.5}}),
        (3000, {"a/b": {4: 1.5}}),
    ]


def test_an_evaluation_is_recorded_with_its_checkpoint_and_duration(tmp_path: Path, monkeypatch):
    run = RunDirectory(tmp_path)
    for digest, asked in (("", WHILE_TRAINING), ("ab", "a watcher's questions")):
        report = TaskReport(step=9, tokens=8, trained_recurrent_steps=4, manifest_sha256=digest)
        report.failures["mano"] = "no room"
        append_evaluation(run, report, asked=asked, seconds=1.2345)
    first, second = read_jsonl(run.evals_jsonl)
    assert (first["manifest_sha256"], second["manifest_sha256"]) == (None, "ab")
    assert (first["step"], first["tokens"], first["seconds"]) == (9, 8, 1.23)
    assert first["failures"] == {"mano": "no room"}

    def full(*_: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("titan_loop.evaluation.evals_log.append_jsonl", full)
        append_evaluation(run, report, asked=WHILE_TRAINING, seconds=3)  # training goes on
        with pytest.raises(OSError, match="no space"):
            append_evaluation(run, report, asked="a watcher's questions", seconds=4)
    append_evaluation(run, report, asked=WHILE_TRAINING, seconds=5)
    assert [record["seconds"] for record in read_jsonl(run.evals_jsonl)[2:]] == [3, 5]


def test_several_runs_are_drawn_beside_each_other(drawn: list[Any], tmp_path: Path, capsys):
    for name, depths in (("deep/run", (1, 2)), ("flat/run", (1,))):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir(parents=True)
        write_metrics(run, 6, gate=False)
        scored(*depths).save(run)
    folders = [str(tmp_path / name) for name in ("flat/run", "deep/run")]
    assert main(["plot", *folders]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [
        "compared_losses.png",
        "compared_depths.png",
    ]
    losses, bits = drawn
    for figure in (losses, bits):  # stages of one name are told apart by their folders
        names = {text.get_text() for text in figure.axes[0].get_legend().texts}
        assert names == {"flat/run", "deep/run"}
    (dashed,) = [line for line in bits.axes[0].lines if line.get_linestyle() == "--"]
    assert [*dashed.get_ydata()] == [2.5, 2.5]


def test_one_record_without_a_gate_and_none(tmp_path: Path):
    run = RunDirectory(tmp_path)
    with pytest.raises(UserError, match="train the run first"):
        plot_run(run)
    write_metrics(run, 1, gate=False)
    assert [path.name for path in plot_run(run)] == ["loss_per_step.png"]
