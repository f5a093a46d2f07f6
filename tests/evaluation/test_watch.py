"""The watcher: each checkpoint once, across restarts, deletions and other watchers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from titan_loop.checkpoint.folders import discard
from titan_loop.checkpoint.manifest import MANIFEST
from titan_loop.errors import UserError
from titan_loop.evaluation.evals_log import LOCKS
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.wandb_log import training_run_id
from titan_loop.evaluation.watch import Watcher
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

OPTIONS = TaskOptions(tasks=("held_out",), windows=2, depths=(1, 2))


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    return write_run_of(source, tmp_path / "run")


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(RunDirectory(run).evals_jsonl)]


def test_each_checkpoint_once_also_after_a_restart(run: Path):
    for step in (3, 6):
        write_checkpoint_of(run, step)
    assert Watcher(run, OPTIONS).run(once=True) == 2
    assert steps(run) == [3, 6]
    assert Watcher(run, OPTIONS).run(once=True) == 0
    write_checkpoint_of(run, 9)  # the last one: now the watcher ends by itself
    assert Watcher(run, OPTIONS).run(interval_seconds=0.01) == 1
    records = read_jsonl(RunDirectory(run).evals_jsonl)
    assert [record["tokens"] for record in records] == [300, 600, 900]
    report = evaluate_tasks(RunDirectory(run).checkpoint(6), OPTIONS)
    assert records[1]["results"] == report.flat()
    assert records[1]["failures"] == {}
    # Other questions are another evaluation.
    others = TaskOptions(tasks=("held_out",), windows=3)
    assert Watcher(run, others).run(once=True) == 3


def test_a_task_without_result_is_recorded_and_ends_with_code_1(run: Path, capsys):
    from titan_loop.cli.main import main

    write_checkpoint_of(run, 9)
    flags = ("--tasks", "held_out", "--windows", "1", "--max-length", "8", "--once")
    assert main(["eval", "watch", str(run), *flags]) == 1
    assert "steps 9 lack results" in capsys.readouterr().err
    (record,) = read_jsonl(RunDirectory(run).evals_jsonl)
    assert [*record["failures"]] == ["held_out"]


@pytest.mark.parametrize("when", ["before", "manifest", "weights", "after loading"])
def test_a_deletion_at_any_moment_is_no_error(run: Path, monkeypatch, caplog, when: str):
    """The keep policy removes the manifest first, then the rest."""
    for step in (3, 6):
        write_checkpoint_of(run, step)
    gone = RunDirectory(run).checkpoint(3)
    from titan_loop.evaluation import evaluate_tasks as module

    load = module.load_checkpoint

    def load_during_deletion(path, **options):
        if Path(path) != gone:
            return load(path, **options)
        if when == "after loading":
            loaded = load(path, **options)
            discard(gone)
            return loaded
        if when == "weights":  # between reading the manifest and the weights
            from titan_loop.inference import loading

            load_model = loading.load_model

            def delete_then_load(*arguments, **keywords):
                discard(gone)
                return load_model(*arguments, **keywords)

            with monkeypatch.context() as patch:
                patch.setattr(loading, "load_model", delete_then_load)
                return load(path, **options)
        (gone / MANIFEST).unlink()
        if when == "before":
            shutil.rmtree(gone)
        return load(path, **options)

    monkeypatch.setattr(module, "load_checkpoint", load_during_deletion)
    evaluated = Watcher(run, OPTIONS).run(once=True)
    assert steps(run) == ([3, 6] if when == "after loading" else [6])
    assert evaluated == len(steps(run))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_damaged_checkpoint_is_passed_over_and_said_once(run: Path, caplog):
    for step in (3, 6):
        write_checkpoint_of(run, step)
    weights = next(RunDirectory(run).checkpoint(3).glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-10])
    watcher = Watcher(run, OPTIONS)
    assert watcher.run(once=True) == 1
    assert watcher.incomplete == [3]
    assert steps(run) == [6]
    said = [record for record in caplog.records if "cannot be evaluated" in record.message]
    assert len(said) == 1


def test_what_another_watcher_has_claimed_is_left_alone(run: Path):
    for step in (3, 6):
        write_checkpoint_of(run, step)
    claims = RunDirectory(run).evaluations / LOCKS
    claims.mkdir(parents=True)
    holder = subprocess.Popen(
        [
            sys.executable, "-c",
            "import fcntl, sys\nf = open(sys.argv[1], 'a+')\nfcntl.lockf(f, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\nsys.stdin.read()",
            str(claims / "step-3.lock"),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert Watcher(run, OPTIONS).run(once=True) == 1
        assert steps(run) == [6]
    finally:
        holder.communicate("")
    assert Watcher(run, OPTIONS).run(once=True) == 1  # its holder has ended
    assert steps(run) == [6, 3]


def test_bad_input(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="interval=0"):
        Watcher(run, OPTIONS).run(interval_seconds=0)
    with pytest.raises(UserError, match="is not a run directory"):
        Watcher(tmp_path / "nothing", OPTIONS).run(once=True)
    with pytest.raises(UserError, match="limit=0"):
        Watcher(run, TaskOptions(tasks=("held_out",), limit=0))


def test_wandb_continues_the_trainings_run_on_an_axis_of_its_own(run: Path, monkeypatch):
    """Read back from the file that offline mode leaves; no server was ever asked."""
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    directory = RunDirectory(run)
    assert training_run_id(directory) is None
    directory.wandb_run_id.parent.mkdir()
    directory.wandb_run_id.write_text("trained1\n")
    for step in (3, 6):
        write_checkpoint_of(run, step)
    assert Watcher(run, OPTIONS, wandb=True).run(once=True) == 2

    (written,) = run.glob("wandb/offline-run-*/run-trained1.wandb")
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(written)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = [json.loads(line) for line in shown.stdout.splitlines() if line.startswith("{")]
    (started,) = [record["run"] for record in found if record["type"] == "run"]
    assert started["run_id"] == "trained1"
    axes = [record["metric"] for record in found if record["type"] == "metric"]
    assert axes[0]["name"] == "eval/step"
    assert (axes[1]["glob_name"], axes[1]["step_metric"]) == ("eval/*", "eval/step")
    points = [record["history"]["item"] for record in found if record["type"] == "history"]
    assert [(point["eval/step"], point["eval/tokens"]) for point in points] == [(3, 300), (6, 600)]
    expected = read_jsonl(directory.evals_jsonl)[1]["results"]
    assert {name: points[1][f"eval/{name}"] for name in expected} == pytest.approx(expected)


def test_what_failed_is_asked_again_when_told_to(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write_checkpoint_of(run, 3)

    def fail(*_: object) -> None:
        raise RuntimeError("the disk of that node")

    with monkeypatch.context() as patch:
        patch.setattr("titan_loop.evaluation.evaluate_tasks.score_windows", fail)
        watcher = Watcher(run, OPTIONS)
        assert watcher.run(once=True) == 1
        assert watcher.incomplete == [3]
        assert Watcher(run, OPTIONS, retry=True).run(once=True) == 1  # once, not for ever
    assert Watcher(run, OPTIONS).run(once=True) == 0
    with caplog.at_level("INFO", logger="titan_loop"):
        assert Watcher(run, OPTIONS, retry=True).run(once=True) == 1
    last = read_jsonl(RunDirectory(run).evals_jsonl)[-1]
    assert last["failures"] == {}
    value = last["results"]["held_out/source/bits_per_byte/static:1"]
    assert f"held_out/source bits_per_byte R=1 {value:.3f} R=2 " in caplog.text
    assert Watcher(run, OPTIONS, retry=True).run(once=True) == 0
