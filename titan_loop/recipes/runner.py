"""Runs what remains of a recipe, stage after stage, in one process a rank.

Everything a user can get wrong in any stage is checked before the first one starts. A stage that is
complete is passed over, one that was interrupted continues from its newest checkpoint, and one that
has not begun starts from its parent's last, which must hold all the parent's tokens. The process
group serves all stages; models, meshes and optimiser states of a stage are gone before the next one
is built.
"""

import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import titan_loop.compat as compat  # before any torchtitan module
from torchtitan.tools.logging import init_logger, logger

from titan_loop.checkpoint.carry import check_parent
from titan_loop.checkpoint.choosing import newest_good
from titan_loop.data.load.loader import WindowLoader
from titan_loop.distributed.compiler import keep_compiled_code
from titan_loop.errors import UserError, raise_first
from titan_loop.evaluation.while_training import check_suite, evaluations
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.runs.run_directory import COMPILE_CACHE, RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import PlannedStage, write_plan
from titan_loop.training.preflight import folder_refusals
from titan_loop.training.resolved_run import ResolvedRun, resolve
from titan_loop.training.run import check_resumable, run_training, shutdown
from titan_loop.training.startup import StartupClock
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer

MOST_SILENT_EPOCHS = 4
"""How often a stage may read a source without saying so. Up to four epochs are nearly as good as
new tokens (Muennighoff et al. 2023, arXiv 2305.16264, §5); beyond that it should be a decision."""


def run_recipe(
    recipe: Recipe,
    *,
    folder: str = "",
    only: str | None = None,
    stop_listener: StopListener | None = None,
) -> None:
    """Train the stages that are not complete; call it on every rank the launcher started.

    Args:
        recipe: The recipe; its configs are placed.
        folder: Where the stages' run directories go; empty for the recipe's own.
        only: The one stage to train. What the flags of this start say is not for the others: they
            are what their own run directories record.
        stop_listener: Hears who asks the run to stop; None for nobody.

    Raises:
        UserError: One line naming stage, field, value and fix. Nothing has started then, unless a
            stage turns out to end before its last token: it is trained, and its children are not.
        NonFiniteError: Training stopped, see `titan_loop.training.stability`.
        StoppedError: A signal asked it to; see `titan_loop.training.stop_request`.
    """
    startup = StartupClock(since_process_start=True)
    startup.mark("imports")
    rank, world_size = compat.start_runtime()
    init_logger()
    root, stages = check_recipe(recipe, world_size, folder=folder, only=only, warn=rank == 0)
    raise_first(folder_refusals(root))
    keep_compiled_code(root / COMPILE_CACHE)
    if rank == 0 and len(recipe.stages) > 1:
        planned = [PlannedStage(s.name, s.parent, s.config.total_tokens) for s in recipe.stages]
        write_plan(root, recipe.name, planned)
    try:
        for number, stage in enumerate(stages, start=1):
            if len(recipe.stages) > 1:
                logger.info("Stage %s (%d of %d)", stage.name, number, len(stages))
            _require_complete_parent(recipe, stage)
            run_training(
                stage.config,
                stop_listener=stop_listener,
                evaluations=evaluations,
                startup=startup,
            )
            if startup.finished:
                startup = StartupClock()  # of the next stage
            gc.collect()  # torchtitan turns automatic collection off; a model has cycles
    finally:
        shutdown()


def check_recipe(
    recipe: Recipe,
    world_size: int,
    *,
    folder: str = "",
    only: str | None = None,
    warn: bool = True,
) -> tuple[Path, list[Stage]]:
    """Refuse what cannot be trained; touches neither a process group nor a device.

    Args:
        recipe: The recipe; its configs are placed.
        world_size: Ranks that will train.
        folder: As for `run_recipe`.
        only: As for `run_recipe`.
        warn: Whether to say what can be trained, but is hardly meant.

    Returns:
        The recipe's folder, and the stages to train.

    Raises:
        UserError: One line naming stage, field, value and fix.
    """
    recipe.check()
    root = recipe.place(folder)
    stages = recipe.stages if only is None else [recipe.stage(only)]
    for stage in recipe.stages:
        if only not in (None, stage.name):
            _adopt_recorded(stage.config)
    if only is not None:
        _require_complete_parent(recipe, stages[0])
    for stage in stages:
        _check(recipe, stage, world_size)
        if warn:
            _warn_of_same_windows(recipe, stage)
    return root, stages


def is_complete(config: LoopTrainer.Config) -> bool:
    """Return whether a checkpoint of a placed run holds its last token.

    Raises:
        UserError: It has checkpoints, and none is usable.
    """
    state = _saved_state(config)
    return state is not None and state["tokens"] >= config.total_tokens


def _adopt_recorded(config: LoopTrainer.Config) -> None:
    """Give a run that this start does not train the length and weights its own start gave it."""
    if RunDirectory(config.dump_folder).config_json.exists():
        recorded = SavedRun(config.dump_folder)
        config.total_tokens = recorded.total_tokens
        if recorded.trainable is not None:
            config.trainable = recorded.trainable


def _check(recipe: Recipe, stage: Stage, world_size: int) -> None:
    """Refuse a stage that cannot run, cannot continue, or cannot start from its parent."""
    try:
        run = resolve(stage.config, world_size)
        check_suite(stage.config)
        if stage.parent is None or _saved_state(stage.config) is not None:
            check_resumable(run)  # a checkpoint that is no stage's as parent included
        else:
            _check_carried(run, stage.parent, recipe.stage(stage.parent).config)
        if len(recipe.stages) > 1 and _saved_state(stage.config) is None:
            _check_repetition(stage)
    except UserError as error:
        if len(recipe.stages) == 1:
            raise
        raise UserError(f"stage {stage.name}: {error}") from error


def _check_carried(run: ResolvedRun, name: str, parent: LoopTrainer.Config) -> None:
    """Refuse what a stage cannot take from its parent, whether that is trained yet or not."""
    carry, trainable = run.config.checkpoint.carry, run.config.trainable
    state = _saved_state(parent)
    trained = (
        resolve(parent, run.world_size).architecture if state is None else state["architecture"]
    )
    check_parent(trained, run.architecture, carry)
    if carry.optimizer and parent.trainable != trainable:
        raise UserError(
            f"checkpoint.carry.optimizer=True, but {name} has moments for "
            f"trainable={parent.trainable} and this stage wants them for "
            f"trainable={trainable}; set it to False"
        )


def _check_repetition(stage: Stage) -> None:
    """Refuse a stage that is much longer than its data, unless `max_epochs` says that is meant."""
    loader = stage.config.open_data()
    if not isinstance(loader, WindowLoader):
        return
    uncapped = [
        (source.needed_tokens / source.available_tokens, source.name)
        for source in loader.demand(stage.config.windows_of_the_run())
        if source.max_epochs is None
    ]
    epochs, name = max(uncapped, default=(0.0, ""))
    if epochs > MOST_SILENT_EPOCHS:
        raise UserError(
            f"total_tokens={stage.config.total_tokens} reads {name} {epochs:.1f} times; lower it, "
            "add documents, or say that it is meant: "
            f"--stages.{stage.name}.dataloader.max-epochs {math.ceil(epochs)}"
        )


def _warn_of_same_windows(recipe: Recipe, stage: Stage) -> None:
    """Say so if a stage reads the windows of its parent again, in the same order."""
    if stage.parent is None:
        return
    parent = recipe.stage(stage.parent).config
    here, before = (config.dataloader.to_dict() for config in (stage.config, parent))
    shared = set(stage.config.dataloader.source_paths()) & set(parent.dataloader.source_paths())
    same_windows = stage.config.training.seq_len == parent.training.seq_len
    if shared and same_windows and here.get("seed") == before.get("seed"):
        logger.warning(
            "stage %s reads the same windows in the same order as %s, of %s; give it another "
            "dataloader.seed",
            stage.name,
            stage.parent,
            ", ".join(sorted(shared)),
        )


def _require_complete_parent(recipe: Recipe, stage: Stage) -> None:
    """Refuse to start a stage, not to continue one, while its parent lacks tokens."""
    if stage.parent is None or _saved_state(stage.config) is not None:
        return
    parent = recipe.stage(stage.parent).config
    state = _saved_state(parent)
    tokens = 0 if state is None else state["tokens"]
    if tokens < parent.total_tokens:
        raise UserError(
            f"stage {stage.name} starts from {stage.parent}, which has {tokens} of "
            f"{parent.total_tokens} tokens in {parent.dump_folder}; train it to its end (without "
            f"--training.steps), or fork with --stage {stage.name} --checkpoint.carry.parent "
            "CHECKPOINT"
        )


def _saved_state(config: LoopTrainer.Config) -> Mapping[str, Any] | None:
    """Return what the trainer recorded in a run's newest checkpoint; None if it has none.

    Raises:
        UserError: It has checkpoints, and none is usable.
    """
    newest = newest_good(RunDirectory(config.dump_folder).checkpoints, look_at="manifest")
    return None if newest is None else newest[1]["trainer"]
