"""Evaluating a run: what is missing is one line, and a run of any length ends in minutes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.families.ouro.hugging_face.conftest import convert
from tests.support.tiny import SEQ_LEN
from titan_loop.cli.main import main
from titan_loop.data.load.windows import CutWindows
from titan_loop.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from titan_loop.evaluation import evaluate_run as module
from titan_loop.evaluation.depth_report import DepthReport
from titan_loop.evaluation.evaluate_run import evaluate_run, sample_windows
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.runs.run_directory import RunDirectory

REAL_RUN_WINDOWS = 3_000_000_000_000 // SEQ_LEN


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Epoch and number of every training window that is read; more than 1,000 are an error."""
    found: list[tuple[int, int]] = []
    read_into = CutWindows.read_into

    def counted(self: CutWindows, epoch: int, number: int, window: object) -> None:
        found.append((epoch, number))
        assert len(found) <= 1000, "this would read the whole run"
        read_into(self, epoch, number, window)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(CutWindows, "read_into", counted)
    return found


def test_a_run_of_three_trillion_tokens_is_sampled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read, caplog
):
    monkeypatch.setattr(module, "MOST_COUNTED_TOKENS", 300 * SEQ_LEN)
    run = RunDirectory(write_run_of(source, tmp_path / "run"))
    write_checkpoint_of(run.path, 3, windows_consumed=REAL_RUN_WINDOWS)
    with caplog.at_level("INFO", logger="titan_loop"):
        report = evaluate_run(run.path, depths=[1, 2], windows=4)
    assert len(read) == 300 + 4  # four are held-out windows
    epochs = [epoch for epoch, _ in read[4:]]
    assert epochs == sorted(epochs)
    assert epochs[0] < 0.01 * epochs[-1]  # from the beginning to the end
    assert "count 9,600 of the 3,000,000,000,000 tokens" in caplog.text
    assert report.baseline_tokens is not None
    assert 0 < report.baseline_tokens <= 300 * SEQ_LEN
    assert DepthReport.latest(run) == report


def test_the_baselines_count_repeated_text_again_and_no_other(source: Path, tmp_path: Path, read):
    run = RunDirectory(write_run_of(source, tmp_path / "run"))
    config = run.read_config()
    config["dataloader"]["unique_tokens"] = 8 * SEQ_LEN
    run.config_json.write_text(json.dumps(config))
    write_checkpoint_of(run.path, 3, windows_consumed=40)
    evaluate_run(run.path, depths=[1], windows=4)
    assert len(read) == 40 + 4
    assert len({*read[4:]}) == 8


def test_the_sample_covers_the_run_without_repetition():
    assert sample_windows(5, 10).tolist() == [0, 1, 2, 3, 4]
    for consumed in (11, 12_345, REAL_RUN_WINDOWS):
        chosen = sample_windows(consumed, 10)
        bounds = [part * consumed // 10 for part in range(11)]
        assert np.searchsorted(bounds, chosen, side="right").tolist() == list(range(1, 11))
    # Equal distances of 7 would hit one source of a mixture with period 7 every time.
    assert len(np.unique(sample_windows(7000, 1000) % 7)) == 7


def test_sources_that_cannot_be_scored_are_named_and_the_others_scored(
    source: Path, little_held_out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = RunDirectory(write_run_of(source, tmp_path / "run", little_held_out))
    write_checkpoint_of(run.path, 3)
    report = evaluate_run(run.path, depths=[1], windows=2)
    assert list(report.sources) == ["source"]
    assert f"not scored: source {little_held_out} has" in caplog.text
    options = TaskOptions(tasks=("held_out",), windows=2)
    assert list(evaluate_tasks(run.path, options).tasks) == ["held_out/source"]
    with pytest.raises(
        UserError, match=r"little has .* tokens in 'held_out', less than one window"
    ):
        evaluate_run(run.path, depths=[1], sources=["little"])


def test_sources_and_window_are_chosen(source: Path, little_held_out: Path, tmp_path: Path):
    run = RunDirectory(write_run_of(source, tmp_path / "run", little_held_out))
    write_checkpoint_of(run.path, 3)
    together = evaluate_run(run.path, depths=[1], windows=2, seq_len=8)
    assert list(together.sources) == ["source", "little", "all"]
    (alone,) = evaluate_run(
        run.path, depths=[1], windows=2, seq_len=8, sources=["little"]
    ).sources.items()
    assert alone == ("little", together.sources["little"])
    longer = 3 * SEQ_LEN  # than the rotary table of training
    options = TaskOptions(tasks=("held_out",), windows=2, sources=[str(source)], seq_len=longer)
    (result,) = evaluate_tasks(run.path, options).tasks["held_out/source"].values()
    assert result.metrics["bits_per_byte"] > 1
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"other/tokenizer\.json"):
        evaluate_run(run.path, depths=[1], sources=[str(other)])


def test_an_imported_model_is_scored_on_sources_that_are_named(
    source: Path, tmp_path: Path, capsys
):
    run = write_run_of(source, tmp_path / "run")
    write_checkpoint_of(run, 3)
    convert("export", run, "--output", tmp_path / "exported")
    convert("import", tmp_path / "exported", "--output", tmp_path / "imported")
    capsys.readouterr()
    words = ["eval", str(tmp_path / "imported"), "--depths", "1", "4", "--windows", "2"]
    assert main([*words, "--sources", str(source)]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "R = 4 (trained)" in printed
    assert "gram" not in printed  # it has read nothing that an n-gram model could count
    report = DepthReport.latest(RunDirectory(tmp_path / "imported"))
    before = evaluate_run(run, depths=[1, 4], windows=2)
    assert report.sources[source.name].depths == before.sources[source.name].depths
    assert main([*words, "--sources", str(source), "--beats-unigram", "0.1"]) == EXIT_USER_ERROR
    assert "--beats-unigram needs a run that has read prepared sources" in capsys.readouterr().err
    assert main(words) == EXIT_USER_ERROR
