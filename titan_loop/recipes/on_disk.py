"""A run's folder as a start finds it: on rank 0, before the trainer is built.

Rewinds and remote copies are taken up first, since they decide which checkpoint is the newest. Then
comes the question whether it can be resumed, and last the facts that only the log needs.
"""

from pathlib import Path
from typing import NamedTuple

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.choosing import inspect
from titan_loop.checkpoint.folders import committed_steps, step_folder
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.remote import fetch_if_needed
from titan_loop.checkpoint.rewinds import read_rewinds, take_up_rewinds
from titan_loop.checkpoint.start_from import check_moments, check_parent, has_moments
from titan_loop.errors import UserError, raise_first
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.room import wait_for_room
from titan_loop.training.chosen_model import Newest
from titan_loop.training.config import RunConfig
from titan_loop.training.config_changes import (
    SettingChange,
    change_refusals,
    parent_changes,
    setting_changes,
)
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.run import remote_of


class Found(NamedTuple):
    """What rank 0 found in the folder of a run that has something left to train.

    Attributes:
        changes: Settings that differ from the last start's.
        from_parent: Settings that differ from the parent's, before the first checkpoint.
    """

    changes: list[SettingChange]
    from_parent: list[SettingChange]


def find(run: ResolvedRun, newest: Newest) -> Found | None:
    """Return what a start has to know of a run's folder; None if nothing is left to train."""
    config, directory = run.config, RunDirectory(run.config.dump_folder)
    if directory.run_json.exists():
        directory.read_run()  # refuses a file that cannot be read
    if directory.config_json.exists():
        directory.read_config()
    if not check_resumable(run, newest):
        copy_last_checkpoint(config)
        return None
    wait_for_room(directory.path, _checkpoint_bytes(config, newest))
    started = committed_steps(directory.checkpoints)
    return Found(setting_changes(config), [] if started else parent_changes(run))


def fetch_checkpoints(config: RunConfig) -> None:
    """Take up rewinds; fetch a remote checkpoint if no local one is whole; on rank 0."""
    run, asked = RunDirectory(config.dump_folder), config.checkpoint
    if not asked.enable or asked.load_only or not (asked.remote or read_rewinds(run.path)):
        return
    try:
        lock = run.lock()
    except UserError as error:  # another job trains here; this stage's own start will report it
        logger.info("Nothing is fetched: %s", error)
        return
    with lock:
        store = remote_of(config)
        take_up_rewinds(run.path, run.checkpoints, store)
        if store is not None:
            fetch_if_needed(store, run.path)


def copy_last_checkpoint(config: RunConfig) -> None:
    """Copy a finished run's last checkpoint to its store, if it is not there yet; on rank 0."""
    if (remote := remote_of(config)) is not None:
        copies = config.checkpoint.uploader(remote)
        copies.catch_up(RunDirectory(config.dump_folder).checkpoints)
        copies.close()


def _checkpoint_bytes(config: RunConfig, newest: Newest) -> int:
    """Return the size to expect of the next checkpoint: the newest one's, or 0 without one."""
    found = newest() if config.checkpoint.enable else None
    return sum(file["bytes"] for file in found[1]["files"].values()) if found else 0


def check_resumable(run: ResolvedRun, newest: Newest) -> bool:
    """Return whether anything is left to train; refuse a checkpoint that does not fit."""
    config = run.config
    if not config.checkpoint.enable:
        return True
    folder, step = RunDirectory(config.dump_folder).checkpoints, config.checkpoint.load_step
    if step == -1:
        found = newest()
        if found is None:
            _check_start(run)
            return True
        step, manifest = found
    else:
        _require_newest(step, folder)
        manifest = read_manifest(step_folder(folder, step))
    state = manifest["trainer"]
    check_architecture(state["architecture"], run.architecture)
    config.open_data().check_state(manifest["data"])
    if state["tokens"] == 0 and not has_moments(step_folder(folder, step)):
        raise UserError(
            f"{config.dump_folder} starts with weights that have no optimizer moments, as after "
            "an import; train another run from it: --dump-folder NEW --checkpoint.carry.parent "
            f"{config.dump_folder} --checkpoint.carry.no-optimizer"
        )
    limit = config.training.steps
    if state["tokens"] < config.total_tokens and not 0 < limit <= state["step"]:
        raise_first(change_refusals(config))
        return True
    # A run is done if its last checkpoint is whole; otherwise loading finds an older one.
    return inspect(step_folder(folder, step), "sizes")[0] is None


def _require_newest(step: int, folder: Path) -> None:
    steps = committed_steps(folder)
    if step not in steps:
        raise UserError(
            f"checkpoint.load_step={step} does not exist in {folder}; there are {steps or 'none'}"
        )
    if step != steps[-1]:
        raise UserError(
            f"checkpoint.load_step={step} would leave newer checkpoints "
            f"{[s for s in steps if s > step]} of another attempt in {folder}; delete their "
            "folders to go back for good"
        )


def _check_start(run: ResolvedRun) -> None:
    carry = run.config.checkpoint.carry
    if carry.parent:
        parent = carry.find_parent()
        state = read_manifest(parent)["trainer"]
        check_parent(state["architecture"], run.architecture, carry)
        check_moments(parent, carry)
