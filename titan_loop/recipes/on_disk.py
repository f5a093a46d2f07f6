"""A run's folder as a start finds it: on rank 0, before the trainer is built.

Rewinds and remote copies are taken up first, since they decide which checkpoint is the newest. Then
comes the question whether it can be resumed.
"""

from collections.abc import Mapping
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.choosing import inspect
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.remote import fetch_if_needed
from titan_loop.checkpoint.rewinds import read_rewinds, take_up_rewinds
from titan_loop.checkpoint.start_from import check_moments, check_parent, has_moments
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import nested
from titan_loop.storage.room import require_room
from titan_loop.training.chosen_model import Newest
from titan_loop.training.config import RunConfig
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.run import remote_of


def is_to_be_trained(run: ResolvedRun, newest: Newest) -> bool:
    """Return whether anything is left to train, and there is room for it; refuse a wrong folder."""
    config, directory = run.config, RunDirectory(run.config.dump_folder)
    if directory.run_json.exists():
        directory.read_run()  # refuses a file that cannot be read
    before = directory.read_config() if directory.config_json.exists() else {}
    if not check_resumable(run, newest):
        copy_last_checkpoint(config)
        return False
    found = newest() if config.checkpoint.enable else None
    if found is not None:  # before the new config is written
        fix = "train another run from it: --dump-folder NEW --checkpoint.carry.parent "
        fix += f"{config.dump_folder} --checkpoint.carry.no-optimizer"
        _check_same_moments(config, before, fix)
    expected = sum(file["bytes"] for file in found[1]["files"].values()) if found else 0
    require_room(directory.path, expected)
    return True


def _check_same_moments(config: RunConfig, before: Mapping[str, Any], fix: str) -> None:
    for field, chosen in (
        ("optimizer.name", config.optimizer.name),
        ("trainable", config.trainable),
    ):
        if (of_moments := nested(before, field)) not in (None, chosen):
            problem = f"{field}={chosen} cannot go on with the moments of {of_moments}"
            raise UserError(f"{problem}; use that, or {fix}")


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


def check_resumable(run: ResolvedRun, newest: Newest) -> bool:
    """Return whether anything is left to train; refuse a checkpoint that does not fit."""
    config = run.config
    if not config.checkpoint.enable:
        return True
    found = newest()
    if found is None:
        if (carry := config.checkpoint.carry).parent:
            parent = carry.find_parent()
            trained = read_manifest(parent)["trainer"]["architecture"]
            check_parent(trained, run.architecture, carry)
            check_moments(parent, carry)
            run_of_parent = RunDirectory(parent.parent.parent)
            if carry.optimizer and run_of_parent.config_json.exists():
                fix = "start without them: --checkpoint.carry.no-optimizer"
                _check_same_moments(config, run_of_parent.read_config(), fix)
        return True
    step, manifest = found
    state, checkpoint = manifest["trainer"], RunDirectory(config.dump_folder).checkpoint(step)
    check_architecture(state["architecture"], run.architecture)
    config.open_data().check_state(manifest["data"])
    if state["tokens"] == 0 and not has_moments(checkpoint):
        raise UserError(
            f"{config.dump_folder} starts with weights that have no optimizer moments, as after "
            "an import; train another run from it: --dump-folder NEW --checkpoint.carry.parent "
            f"{config.dump_folder} --checkpoint.carry.no-optimizer"
        )
    limit = config.training.steps
    if state["tokens"] < config.total_tokens and not 0 < limit <= state["step"]:
        return True
    # A run is done if its last checkpoint is whole; otherwise loading finds an older one.
    return inspect(checkpoint, "sizes")[0] is None
