"""Rewinds here and in the object store, killed between any two of their operations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_choosing import committed
from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest, write_manifest
from titan_loop.checkpoint.remote import RemoteCheckpoints, fetch_if_needed
from titan_loop.checkpoint.rewinds import REWINDS, jumped_windows, read_rewinds, take_up_rewinds
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json
from titan_loop.storage.remote_folder import RemoteFolder
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.stability.recovery import SkippedStep, rewind

SPIKES = [SkippedStep(14, 104, 112), SkippedStep(15, 112, 120)]
STABILITY = StabilityConfig(skip_spikes=True, window=8, skips=2)


class KilledError(BaseException):
    """Stands for the end of the process."""


def store(folder: Path, run: Path) -> RemoteCheckpoints:
    owner = folder / "remote" / "owner.json"
    if owner.exists() and not run.exists():  # its disk was lost
        run.mkdir()
        shutil.copy(owner, run / "remote.json")
    return RemoteCheckpoints(f"file://{folder}/remote", stage="", run=run)


def saved(run: Path, steps: list[int], folder: Path | None = None) -> None:
    """Commit checkpoints, and copy them to the store if there is one."""
    for step in steps:
        checkpoint = committed(run / "checkpoints", step)
        if folder is not None:
            store(folder, run).upload(checkpoint)


def start(run: Path, folder: Path) -> int:
    """Do what a start does before it loads; return the step that it loads."""
    remote = store(folder, run)
    take_up_rewinds(run, run / "checkpoints", remote)
    fetch_if_needed(remote, run)
    found = newest_good(run / "checkpoints", look_at="hashes")
    assert found is not None
    return found[0]


def killed_before(monkeypatch: pytest.MonkeyPatch, operation: int, act: Callable[[], Any]) -> bool:
    """Do something, and kill it before one of its changes of disk or store; return if it was."""
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            nonlocal done
            done += 1
            if done > operation:
                raise KilledError
            return real(*arguments, **keywords)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("write", "upload", "delete", "download"):
            patch.setattr(RemoteFolder, name, counted(getattr(RemoteFolder, name)))
        patch.setattr(Path, "rename", counted(Path.rename))
        for module in ("checkpoint.rewinds", "checkpoint.remote"):
            patch.setattr(f"titan_loop.{module}.write_json", counted(write_json))
        try:
            act()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("disk", ["stays", "is lost", "was lost before"])
def test_a_rewind_that_is_killed_anywhere_is_taken_up_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
):
    """Whatever was done by then, the next start loads a whole checkpoint that is not given up."""
    operation, killed, recorded = 0, True, []
    while killed:
        folder = tmp_path / str(operation)
        run = folder / "run"
        saved(run, [4, 8, 12, 14, 15], folder)
        if disk == "was lost before":  # one checkpoint was fetched since
            for step in (4, 8, 12, 14):
                shutil.rmtree(run / "checkpoints" / f"step-{step}")

        def act(run: Path = run, folder: Path = folder) -> None:
            assert rewind(RunDirectory(run), store(folder, run), SPIKES, STABILITY) == ""
            start(run, folder)

        killed = killed_before(monkeypatch, operation, act)
        if disk == "is lost":
            shutil.rmtree(run)
        loaded = start(run, folder)
        rewinds = read_rewinds(run)
        recorded.append(bool(rewinds))
        if rewinds:
            assert loaded == 12
            assert jumped_windows(rewinds) == [(104, 120)]
            assert committed_steps(run / "checkpoints")[-1] == 12
            assert store(folder, run).steps() == [4, 8, 12]
        else:  # the decision is taken once more, from the same checkpoint as before
            assert loaded == 15
        operation += 1
    assert recorded[:2] == [False, True]
    assert all(recorded[1:])  # from the first operation on, which is the record in the store
    assert operation > 6


def test_an_older_checkpoint_is_fetched_when_none_here_fits(tmp_path: Path):
    run = tmp_path / "run"
    saved(run, [8, 16], tmp_path)
    shutil.rmtree(run / "checkpoints" / "step-8")
    assert rewind(RunDirectory(run), store(tmp_path, run), SPIKES, STABILITY) == ""
    assert read_rewinds(run)[0]["to_step"] == 8
    assert start(run, tmp_path) == 8
    assert committed_steps(run / "checkpoints") == [8]
    # There is no other, neither here nor there: the same one is taken again.
    assert rewind(RunDirectory(run), store(tmp_path, run), SPIKES, STABILITY) == ""
    assert start(run, tmp_path) == 8
    assert "no rewind is left (stability.rewinds=2)" in rewind(
        RunDirectory(run), None, SPIKES, STABILITY
    )


def test_a_second_rewind_prefers_a_checkpoint_that_none_went_to(tmp_path: Path):
    run = tmp_path / "run"
    saved(run, [4, 8, 12])
    for expected in (12, 8):
        assert rewind(RunDirectory(run), None, SPIKES, STABILITY) == ""
        assert read_rewinds(run)[-1]["to_step"] == expected
    take_up_rewinds(run, run / "checkpoints", None)
    assert committed_steps(run / "checkpoints") == [4, 8]


def test_a_checkpoint_saved_after_the_rewind_stays(tmp_path: Path):
    run = tmp_path / "run"
    saved(run, [12, 15], tmp_path)
    assert rewind(RunDirectory(run), store(tmp_path, run), SPIKES, STABILITY) == ""
    assert start(run, tmp_path) == 12
    checkpoint = committed(run / "checkpoints", 15)
    content = {k: v for k, v in read_manifest(checkpoint).items() if k != "sha256"}
    write_manifest(checkpoint, {**content, "lineage": {"jumps": read_rewinds(run)}})
    store(tmp_path, run).upload(checkpoint)
    assert start(run, tmp_path) == 15
    shutil.rmtree(run)
    assert start(run, tmp_path) == 15
    assert jumped_windows(read_rewinds(run)) == [(104, 120)]


@pytest.mark.parametrize(
    "record",
    [
        {"rewinds": 3},
        {"rewinds": [{"to_step": "3", "windows": []}]},
        {"rewinds": [{"to_step": 3, "windows": [[5, 2]]}]},
    ],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, record: dict[str, Any]):
    write_json(tmp_path / REWINDS, record)
    with pytest.raises(UserError, match=r"rewinds\.json is damaged .*; delete it to go on"):
        read_rewinds(tmp_path)
