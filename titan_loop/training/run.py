"""One resolved run, from its newest checkpoint to its last one: build, train, clean up."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.remote import RemoteCheckpoints
from titan_loop.distributed.kept_layouts import KeptLayouts
from titan_loop.errors import NonFiniteError, StoppedError
from titan_loop.models.family import size_notes
from titan_loop.ranks import all_ranks, on_rank_zero, place_in
from titan_loop.runs.log_file import kept_log
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.callback import Callback
from titan_loop.training.config import RunConfig
from titan_loop.training.config_changes import setting_changes
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.stability.recovery import SpikesError
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer

_AGREED = (StoppedError, NonFiniteError, SpikesError)
"""Errors that all ranks raise together."""


def run_training(
    run: ResolvedRun,
    callbacks: Sequence[Callback] = (),
    *,
    layouts: KeptLayouts | None = None,
    stop_listener: StopListener | None = None,
) -> None:
    """Train a run in this process, one of the launcher's ranks, which stay in their group.

    Args:
        callbacks: In addition to the config's.
        layouts: Meshes of the recipe's earlier stages.

    Raises:
        SpikesError: On all ranks: start again, from an older checkpoint.
        NonFiniteError: See `titan_loop.training.verdict`.
        StoppedError: See `titan_loop.training.stop_request`.
    """
    folder = run.config.dump_folder
    structured_logger.init_structured_logger(
        source="training",
        output_dir=folder,
        enable=run.config.debug.enable_structured_logging,
    )
    with _leaving(stop_listener):
        trainer = LoopTrainer(run, layouts)  # locks the folder, so nothing was written before
    if stop_listener is not None:
        trainer.stop_listener = stop_listener
    trainer.callbacks += callbacks
    together = False
    is_first = place_in(all_ranks())[0] == 0
    log = kept_log(RunDirectory(folder).log_txt) if is_first else nullcontext()
    try:
        with _leaving(stop_listener), log:
            on_rank_zero(all_ranks(), lambda: _begin(trainer))
            trainer.train()
            if is_first:
                _log_end(trainer)
        together = True
    except _AGREED:
        together = True
        raise
    finally:
        trainer.close(together=together)


def remote_of(config: RunConfig) -> RemoteCheckpoints | None:
    """Return the store of a run's remote checkpoints, if it has one."""
    asked, run = config.checkpoint, Path(config.dump_folder)
    if not asked.remote or not asked.enable:
        return None
    return RemoteCheckpoints(asked.remote, stage=config.stage, run=run)


def _begin(trainer: LoopTrainer) -> None:
    config = trainer.run.config
    run = RunDirectory(config.dump_folder)
    changes = setting_changes(config)  # before `create_or_open` writes the new config
    run.create_or_open(sys.argv, config=config.to_dict())
    for note in size_notes(trainer.run.asked, trainer.run.model.vocab_size):
        logger.info("%s", note)
    for change in changes:
        logger.warning("changed since the last start: %s", change)
    if (remote := remote_of(config)) is not None:
        trainer.checkpointer.copy_to(remote)


def _log_end(trainer: LoopTrainer) -> None:
    done, planned = f"{trainer.tokens:,}", f"{trainer.config.total_tokens:,}"
    if trainer.at_stage_end:
        logger.info("Trained to the end: %s tokens", done)
    else:
        text = "Ended at step %d, the limit of training.steps, after %s of %s tokens"
        logger.info(text, trainer.step, done, planned)


@contextmanager
def _leaving(stop_listener: StopListener | None) -> Iterator[None]:
    """Let a rank with an error of its own leave soon, since its peers may wait for it."""
    try:
        yield
    except _AGREED:
        raise
    except BaseException as error:
        if stop_listener is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            stop_listener.leave(error)
        raise
