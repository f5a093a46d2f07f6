"""Plots and tables: drawn from a run directory alone, also from awkward ones."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_loop.analysis import drawing
from titan_loop.analysis.depth_plots import plot_depths
from titan_loop.analysis.report import plot_run
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.evaluation.depth_report import DepthReport, SourceDepths, UnitSums
from titan_loop.evaluation.evals_log import (
    WHILE_TRAINING,
    append_evaluation,
    held_out_while_training,
)
from titan_loop.evaluation.intervals import Interval
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import append_jsonl, read_jsonl

PNG_MAGIC = b"\x89PNG\r\n"

REPORT = DepthReport(
    step=30,
    tokens=30_000,
    trained_recurrent_steps=2,
    sources={
        "code": SourceDepths(
            depths={1: Interval(2.5, 2.4, 2.6), 2: Interval(2.25, 2.2, 2.3)},
            baselines={"unigram": 3.0, "bigram": 2.75},
            windows=8,
            n_bytes=12_345,
            changes={1: Interval(0, 0, 0), 2: Interval(-0.25, -0.3, -0.2)},
            units=UnitSums(n_bytes=[1], nats={1: [2.5], 2: [2.25]}),
        ),
        "math": SourceDepths(
            depths={2: Interval(1.5, 1.4, 1.6)},
            baselines={"unigram": 2.0},
            windows=8,
            n_bytes=99,
            changes={2: Interval(0, 0, 0)},
            units=UnitSums(n_bytes=[1], nats={2: [1.5]}),
        ),
    },
    baseline_tokens=1000,
)


def write_metrics(run: RunDirectory, steps: int, *, gate: bool = True) -> None:
    for step in range(1, steps + 1):
        recurrent_steps = 1 if step < 5 else 2  # R grows while training
        record: dict[str, float] = {"step": step, "tokens": 1000 * step}
        for r in range(1, recurrent_steps + 1):
            record[f"ce/step_{r}"] = 5 * math.exp(-step / 10) + 1 / r
            if gate:
                record[f"exit/pmf_{r}"] = 1 / recurrent_steps
        if gate:
            record["exit/mean_step"] = (recurrent_steps + 1) / 2
        if step == 7:
            record["ce/step_1"] = math.nan
        append_jsonl(run.metrics_jsonl, record)


def test_names_stand_in_the_order_of_their_lines_and_apart(drawn, tmp_path):
    ends = {"low": 0.0, "level": 0.5, "same": 0.5, "near": 0.501, "high": 1.0}

    def draw(axes):
        for name, color in drawing.series_colors([*ends]).items():
            axes.plot([0, 1], [0, ends[name]], color=color, label=name)

    drawing.draw_axes(draw, tmp_path / "x.png", title="A conclusion")
    axes = drawn[0].axes[0]
    assert axes.get_legend() is None
    assert drawn[0].get_suptitle() == "A conclusion"
    named = sorted(axes.texts, key=lambda text: text.xyann[1])
    assert [text.get_text() for text in named] == [*ends]
    heights = np.array([text.xyann[1] for text in named])
    points = 72 * drawn[0].get_figheight() * axes.get_position().height
    assert (np.diff(heights) * points > 10).all()
    colors = {text.get_text(): text.get_color() for text in named}
    assert all(colors[line.get_label()] == line.get_color() for line in axes.lines)


def test_at_most_six_series_have_a_colour():
    names = [f"row {number}" for number in range(9)]
    colors = drawing.series_colors(names)
    assert [*colors] == names
    assert [*colors.values()] == [*drawing.COLORS, *[drawing.GREY] * 3]
    assert len(set(drawing.COLORS)) == 6
    of_depth = [color for color in drawing.depth_colors(16) if isinstance(color, np.ndarray)]
    assert len(of_depth) == 6
    assert not any(isinstance(color, str) for color in drawing.depth_colors(6))


def write_held_out(run: RunDirectory) -> None:
    """Steps 1 and 2, then 2 again and 3, beside a task that is not held-out text."""
    for step, bits in ((1, 9.0), (2, 9.0), (2, 1.5), (3, 1.5)):
        result = ReadingResult(
            metrics={"bits_per_byte": bits, "nats_per_token": 2.5}, mean_steps=4.0
        )
        append_evaluation(
            run,
            TaskReport(
                step=step, tokens=1000 * step, trained_recurrent_steps=4, manifest_sha256="",
                tasks={"held_out/a/b": {"static:4": result}, "mano": {"static:4": result}},
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


def test_every_plot_is_drawn(tmp_path: Path):
    run = RunDirectory(tmp_path)
    write_metrics(run, 30)
    REPORT.save(run)
    write_held_out(run)
    paths = plot_run(run)
    assert [path.name for path in paths] == [
        "loss_per_step.png",
        "exit_pmf.png",
        "held_out.png",
        "bits_per_byte.png",
    ]
    for path in paths:
        assert path.parent == run.plots
        assert path.read_bytes().startswith(PNG_MAGIC)
        assert drawn_share(path) > 0.01


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be written."""
    figures: list[Any] = []

    def keep(figure: Any, path: Path) -> None:
        figures.append(figure)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
    return figures


def test_depths_are_drawn_with_the_intervals_of_their_differences(drawn: list[Any], tmp_path: Path):
    changes = {1: Interval(0, 0, 0), 2: Interval(-0.25, -0.26, -0.24)}
    code = replace(REPORT.sources["code"], changes=changes)
    plot_depths(replace(REPORT, sources={"code": code, "math": REPORT.sources["math"]}), tmp_path)
    assert drawn[0].get_suptitle().startswith("R = 2 is best in 2 of 2 panels")
    axes = drawn[0].axes[0]
    points = next(
        line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() == "o"
    )
    assert [*points.get_ydata()] == [2.5, 2.25]
    low, high = axes.get_ylim()
    assert 2.1 < low < 2.24
    assert 2.5 < high < 2.6  # where no n-gram model squeezes it


def test_several_runs_are_drawn_beside_each_other(drawn: list[Any], tmp_path: Path, capsys):
    for name in ("deep", "flat"):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        write_metrics(run, 6, gate=False)
        records = read_jsonl(run.metrics_jsonl)
        run.metrics_jsonl.unlink()
        for record in records:
            append_jsonl(run.metrics_jsonl, {**record, "recurrent_steps": 1})
        sources = REPORT.sources
        if name == "flat":  # without loops: one depth, a dashed line
            code = sources["code"]
            one = {"depths": {1: code.depths[1]}, "changes": {1: code.changes[1]}}
            units = UnitSums(n_bytes=[1], nats={1: [2.5]})
            sources = {"code": replace(code, **one, units=units)}
        replace(REPORT, sources=sources).save(run)
    folders = [str(tmp_path / name) for name in ("flat", "deep")]
    assert main(["plot", *folders]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [
        "compared_losses.png",
        "compared_bits_per_byte.png",
    ]
    losses, bits = drawn
    assert {text.get_text() for text in losses.axes[0].texts} == {"flat", "deep"}
    assert {text.get_text() for text in bits.axes[0].texts} == {"flat", "deep"}
    (dashed,) = [line for line in bits.axes[0].lines if line.get_linestyle() == "--"]
    assert [*dashed.get_ydata()] == [2.5, 2.5]


def test_one_record_without_a_gate(tmp_path: Path):
    run = RunDirectory(tmp_path)
    write_metrics(run, 1, gate=False)
    assert [path.name for path in plot_run(run)] == ["loss_per_step.png"]


def test_a_run_without_records_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="train the run first"):
        plot_run(RunDirectory(tmp_path))


def drawn_share(path: Path) -> float:
    """Return the share of pixels that are not background."""
    import matplotlib.image

    pixels = np.asarray(matplotlib.image.imread(path))[..., :3]
    return float((pixels.min(axis=-1) < 0.8).mean())
