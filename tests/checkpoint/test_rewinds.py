"""Rewinds of a run, killed between any two of their operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_choosing import committed
from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest, write_manifest
from titan_loop.checkpoint.rewinds import (
    REWINDS,
    jumped_windows,
    read_rewinds,
    take_up_rewinds,
)
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.stability.recovery import SkippedStep
from titan_loop.training.stability.recovery import rewind as decide

SPIKES = [SkippedStep(14, 104, 112), SkippedStep(15, 112, 120)]


class KilledError(BaseException):
    """Stands for the end of the process."""


def saved(run: Path, *steps: int) -> Path:
    for step in steps:
        committed(run / "checkpoints", step)
    return run


def rewind(run: Path) -> str:
    return decide(RunDirectory(run), SPIKES, StabilityConfig(skip_spikes=True, window=8, skips=2))


def start(run: Path) -> int:
    """Do what a start does before it loads; return the step that it loads."""
    take_up_rewinds(run, run / "checkpoints")
    found = newest_good(run / "checkpoints", look_at="hashes")
    assert found is not None
    return found[0]


def killed_before(monkeypatch: pytest.MonkeyPatch, operation: int, act: Callable[[], Any]) -> bool:
    """Do something, and kill it before one of its changes of the disk; return if it was."""
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
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr("titan_loop.checkpoint.rewinds.write_json", counted(write_json))
        try:
            act()
        except KilledError:
            return True
    return False


def test_a_rewind_that_is_killed_anywhere_is_taken_up_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever was done by then, the next start loads a whole checkpoint that is not given up."""
    operation, killed = 0, True
    while killed:
        run = saved(tmp_path / str(operation), 4, 8, 12, 14, 15)

        def act(run: Path = run) -> None:
            assert rewind(run) == ""
            start(run)

        killed = killed_before(monkeypatch, operation, act)
        loaded = start(run)
        if operation == 0:  # the decision is taken once more, from the same checkpoint as before
            assert (read_rewinds(run), loaded) == ([], 15)
        else:
            assert loaded == 12
            assert jumped_windows(read_rewinds(run)) == [(104, 120)]
            assert committed_steps(run / "checkpoints") == [4, 8, 12]
        operation += 1
    assert operation == 4


def test_a_second_rewind_prefers_a_checkpoint_that_none_went_to(tmp_path: Path):
    run = saved(tmp_path / "run", 4, 8, 12)
    for expected in (12, 8):
        assert rewind(run) == ""
        assert read_rewinds(run)[-1]["to_step"] == expected
    assert start(run) == 8
    assert committed_steps(run / "checkpoints") == [4, 8]
    assert "no rewind is left (stability.rewinds=2)" in rewind(run)
    alone = saved(tmp_path / "alone", 8, 16)  # no other is left: it is taken again
    for _ in range(2):
        assert rewind(alone) == ""
        assert start(alone) == 8


def test_a_checkpoint_saved_after_the_rewind_stays(tmp_path: Path):
    run = saved(tmp_path / "run", 12, 15)
    assert rewind(run) == ""
    assert start(run) == 12
    checkpoint = committed(run / "checkpoints", 15)
    content = {k: v for k, v in read_manifest(checkpoint).items() if k != "sha256"}
    write_manifest(checkpoint, {**content, "lineage": {"jumps": read_rewinds(run)}})
    assert start(run) == 15


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
