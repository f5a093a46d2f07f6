"""Finds and verifies checkpoints by the paths that a user gives."""

from dataclasses import replace
from pathlib import Path

from titan_loop.checkpoint.folders import is_committed
from titan_loop.checkpoint.keep_policy import KeepPolicy, named_checkpoint
from titan_loop.checkpoint.listing import ListedCheckpoint, list_checkpoints, look_at
from titan_loop.errors import UserError, runs_in
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun


def checkpoint_meant(path: Path) -> Path:
    """Return a checkpoint's folder; a run stands for its newest whole checkpoint."""
    is_run = RunDirectory(path).run_json.exists()
    return SavedRun(path).checkpoint().path if is_run else named_checkpoint(path)


def checkpoints_folder(path: Path) -> tuple[Path, KeepPolicy]:
    """Return the folder of a run's checkpoints, and the run's reasons to keep them."""
    run_directory = RunDirectory(path)
    if run_directory.run_json.exists():
        return run_directory.checkpoints, _keep_policy(path)
    if not any(path.glob("*step-*")):
        raise UserError(f"{path} has no checkpoints; {runs_in(path, 'give a run directory')}")
    return path, _keep_policy(path.absolute().parent)


def verified(path: Path) -> list[ListedCheckpoint]:
    """List a checkpoint, or all checkpoints of a run, after reading every file."""
    if is_committed(path) or any(path.glob("*.distcp")):
        return [look_at(path, hashes=True)]
    return list_checkpoints(checkpoints_folder(path)[0], hashes=True)


def _keep_policy(run: Path) -> KeepPolicy:
    if not RunDirectory(run).config_json.exists():
        return KeepPolicy()
    return replace(SavedRun(run).keep_policy, keep_latest_k=0)
