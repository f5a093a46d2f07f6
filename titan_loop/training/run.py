"""One run from its config to its last checkpoint: check, build, train, clean up.

Config, data and checkpoints are checked before a process group or a device is touched.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import titan_loop.compat as compat  # before any torchtitan module
import torch.distributed as dist
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.choosing import inspect
from titan_loop.checkpoint.folders import committed_steps, step_folder
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.remote import RemoteCheckpoints, fetch_if_needed
from titan_loop.checkpoint.rewinds import read_rewinds, take_up_rewinds
from titan_loop.checkpoint.start_from import check_moments, check_parent, has_moments
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.mixture import copy_remote_sources
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.remote_source import is_remote
from titan_loop.distributed.compiler import forget_compiled_stage
from titan_loop.errors import (
    EXIT_OK,
    NonFiniteError,
    StoppedError,
    UnstableError,
    UserError,
    raise_first,
)
from titan_loop.models.family import size_notes
from titan_loop.ranks import (
    all_ranks,
    decided_by_rank_zero,
    from_rank_zero,
    on_rank_zero,
    once_per_node,
)
from titan_loop.runs.log_file import kept_log
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.room import require_writable, wait_for_room
from titan_loop.training.callback import Callback
from titan_loop.training.chosen_model import Newest, newest_of, saved_architecture
from titan_loop.training.config import RunConfig
from titan_loop.training.config_changes import (
    SettingChange,
    change_refusals,
    parent_changes,
    setting_changes,
)
from titan_loop.training.resolved_run import ResolvedRun, resolve
from titan_loop.training.stability.recovery import SkippedStep, SpikesError, rewind
from titan_loop.training.startup import StartupClock
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer

_AGREED = (StoppedError, NonFiniteError, SpikesError)
"""Errors that all ranks raise together."""


def run_training(
    config: RunConfig,
    command: Sequence[str] | None = None,
    *,
    stop_listener: StopListener | None = None,
    evaluations: Callable[[RunConfig], Sequence[Callback]] | None = None,
    startup: StartupClock | None = None,
) -> int:
    """Train `config` in this process, one of the ranks that the launcher started; return `EXIT_OK`.

    Continues from the newest good checkpoint of the run directory, if there is one. After too many
    spikes, training starts again from an older checkpoint. The process group stays for the next run
    of a recipe: call `shutdown` after the last.

    Args:
        command: Recorded in `run.json`; None takes this process' command line.
        evaluations: Builds the callbacks of `held_out`, `suite` and a curriculum, since training
            must not import them; None refuses a config that asks for one.
    """
    startup = startup or StartupClock()
    while True:
        try:
            return _start(config, command, stop_listener, evaluations, startup)
        except SpikesError as error:
            spikes = error.spikes  # without the error, whose traceback holds the trainer
        gc.collect()
        forget_compiled_stage()
        config, startup = _rewound(config, spikes), StartupClock()


def _rewound(config: RunConfig, spikes: list[SkippedStep]) -> RunConfig:
    """Record a rewind, and return `config` for the start that takes it up; collective."""
    run = RunDirectory(config.dump_folder)
    decide = partial(rewind, run, _remote(config), spikes, config.stability)
    if stop := from_rank_zero(all_ranks(), decide):
        raise UnstableError(stop)
    return replace(config, checkpoint=replace(config.checkpoint, load_step=-1))


def _start(
    config: RunConfig,
    command: Sequence[str] | None,
    stop_listener: StopListener | None,
    evaluations: Callable[[RunConfig], Sequence[Callback]] | None,
    startup: StartupClock,
) -> int:
    """Train until the run ends; raise `SpikesError` on all ranks if it has to start again."""
    rank, world_size = compat.start_runtime()
    compat.start_logging(rank)
    if world_size == 1:
        compat.skip_final_pause()
    copy_sources([config])
    run_directory = RunDirectory(config.dump_folder)
    require_writable(run_directory.path, f"dump_folder={run_directory.path}")
    newest = newest_of(config)
    # Rank 0 alone looks: ranks that see different checkpoints would train different models.
    saved = decided_by_rank_zero(lambda: saved_architecture(config, newest))
    run = resolve(config, world_size, saved)
    callbacks = _callbacks(config, evaluations)

    def look() -> tuple[list[SettingChange], list[SettingChange]] | None:
        if run_directory.run_json.exists():
            run_directory.read_run()  # refuses a file that cannot be read
        if run_directory.config_json.exists():
            run_directory.read_config()
        now = newest_of(config) if fetch_checkpoints(run.config) else newest
        if not check_resumable(run, now):
            copy_last_checkpoint(run.config)
            return None
        wait_for_room(run_directory.path, _checkpoint_bytes(config, now))
        started = committed_steps(run_directory.checkpoints)
        return setting_changes(run.config), [] if started else parent_changes(run)

    found = decided_by_rank_zero(look)
    if found is None:
        logger.info("Nothing left to train in %s", config.dump_folder)
        return EXIT_OK
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    startup.mark("checks")
    with _leaving(stop_listener, world_size):
        trainer = LoopTrainer(run)  # locks the run directory
    trainer.startup = startup
    if stop_listener is not None:
        trainer.stop_listener = stop_listener
    trainer.callbacks += callbacks
    together = False
    log = kept_log(run_directory.log_txt) if rank == 0 else nullcontext()
    try:
        with _leaving(stop_listener, world_size), log:
            on_rank_zero(all_ranks(), lambda: _begin(trainer, config, command, *found))
            startup.mark("build")
            trainer.train()
            if rank == 0:
                _log_end(trainer)
        together = True
    except _AGREED:
        together = True
        raise
    finally:
        trainer.close(together=together)
    return EXIT_OK


def _begin(
    trainer: LoopTrainer,
    config: RunConfig,
    command: Sequence[str] | None,
    changes: Sequence[SettingChange],
    others: Sequence[SettingChange],
) -> None:
    run, started_by = RunDirectory(config.dump_folder), sys.argv if command is None else command
    record = run.create_or_open(started_by, config=trainer.run.config.to_dict())
    for note in size_notes(config.model, trainer.run.model.vocab_size):
        logger.info("%s", note)
    for change in others:
        logger.warning("differs from the parent: %s", change)
    for change in changes:
        logger.warning("changed since the last start: %s", change)
    if changes:
        kept = run.kept_config(len(record["restarts"]))
        logger.warning("the last start's config is kept as %s", kept)
    if (remote := _remote(config)) is not None:
        trainer.checkpointer.copy_to(remote)


def _log_end(trainer: LoopTrainer) -> None:
    done, planned = f"{trainer.tokens:,}", f"{trainer.config.total_tokens:,}"
    if trainer.at_stage_end:
        logger.info("Trained to the end: %s tokens", done)
    else:
        text = "Ended at step %d, the limit of training.steps, after %s of %s tokens"
        logger.info(text, trainer.step, done, planned)


def _remote(config: RunConfig) -> RemoteCheckpoints | None:
    asked, run = config.checkpoint, Path(config.dump_folder)
    if not asked.remote or not asked.enable:
        return None
    return RemoteCheckpoints(asked.remote, stage=config.stage, run=run, adopt=asked.adopt_remote)


def fetch_checkpoints(config: RunConfig) -> bool:
    """Take up rewinds; fetch a remote checkpoint if no local one is whole; on rank 0.

    Returns True if the run's checkpoints may have changed.
    """
    run, asked = RunDirectory(config.dump_folder), config.checkpoint
    if not asked.enable or asked.load_only or not (asked.remote or read_rewinds(run.path)):
        return False
    try:
        lock = run.lock()
    except UserError as error:  # another job trains here; this stage's own start will report it
        logger.info("Nothing is fetched: %s", error)
        return True
    with lock:
        store = _remote(config)
        take_up_rewinds(run.path, run.checkpoints, store)
        if store is not None:
            fetch_if_needed(store, run.path)
    return True


def copy_last_checkpoint(config: RunConfig) -> None:
    """Copy a finished run's last checkpoint to its store, if it is not there yet; on rank 0."""
    if (remote := _remote(config)) is not None:
        copies = config.checkpoint.uploader(remote)
        copies.catch_up(RunDirectory(config.dump_folder).checkpoints)
        copies.close()


def copy_sources(configs: Sequence[RunConfig]) -> None:
    """Copy sources in object stores to every node's cache; call on all ranks before they meet."""
    loaders = [config.dataloader for config in configs]
    mixtures = [load.mixture for load in loaders if isinstance(load, WindowLoader.Config)]
    entries = dict.fromkeys(chain.from_iterable(mixtures))
    if any(map(is_remote, entries)):
        once_per_node(lambda: copy_remote_sources(entries))


@contextmanager
def _leaving(stop_listener: StopListener | None, world_size: int) -> Iterator[None]:
    """Let a rank with an error of its own leave soon, since its peers may wait for it."""
    try:
        yield
    except _AGREED:
        raise
    except BaseException as error:
        if stop_listener is not None and world_size > 1:
            stop_listener.leave(error)
        raise


def _callbacks(
    config: RunConfig, evaluations: Callable[[RunConfig], Sequence[Callback]] | None
) -> Sequence[Callback]:
    if evaluations is not None:
        return evaluations(config)
    fix = "train with run_recipe, or give run_training "
    fix += "evaluations=titan_loop.evaluation.while_training.evaluations"
    for name, asked in (("held_out", config.held_out), ("suite", config.suite)):
        if asked.interval:
            problem = f"{name}.interval={asked.interval} has no effect without evaluations"
            raise UserError(f"{problem}: {fix}, or set it to 0")
    loader = config.dataloader
    if isinstance(loader, TaskLoader.Config) and loader.curriculum.enabled:
        raise UserError(f"dataloader.curriculum.enabled has no exam without evaluations: {fix}")
    return ()


def shutdown() -> None:
    """Leave the process group, if there is one, after the last run of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _checkpoint_bytes(config: RunConfig, newest: Newest) -> int:
    """Return the size to expect of the next checkpoint: the newest one's, or 0 without one."""
    found = newest() if config.checkpoint.enable else None
    return sum(file["bytes"] for file in found[1]["files"].values()) if found else 0


def check_resumable(run: ResolvedRun, newest: Newest | None = None) -> bool:
    """Return whether anything is left to train; refuse a checkpoint that does not fit.

    `newest` is from `newest_of`; None reads the checkpoint again.
    """
    config = run.config
    if not config.checkpoint.enable:
        return True
    folder, step = RunDirectory(config.dump_folder).checkpoints, config.checkpoint.load_step
    if step == -1:
        found = (newest or newest_of(config))()
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
