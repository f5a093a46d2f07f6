"""The watcher: each checkpoint once, across restarts, deletions and other watchers."""

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


@pytest.mark.parametrize("when", ["before", "weights", "after loading"])
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
