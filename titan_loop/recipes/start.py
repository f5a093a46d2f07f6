"""The only start: a recipe's incomplete stages, one after another, in one process per rank.

    place ─► look (rank 0): disk, model, refusals of every stage
               └─► a stage: look (rank 0) ─► resolve ─► train ─┐
                    ▲   the next stage, or again after a rewind │
                    └──────────────────────────────────────────┘

Mistakes in any stage are reported before the first one starts. A complete stage is skipped, an
interrupted one continues from its newest checkpoint, and a new one starts from its parent's last
checkpoint. All stages share the process group; each is freed before the next one is built.
"""

import gc
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import titan_loop.compat as compat  # before any torchtitan module
import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_loop.distributed.compiler import forget_compiled_stage, keep_compiled_code
from titan_loop.distributed.kept_layouts import KeptLayouts
from titan_loop.errors import UnstableError, UserError, raise_first
from titan_loop.evaluation.suites import suite_refusals
from titan_loop.evaluation.while_training import evaluations
from titan_loop.models.exit_gate import Trainable
from titan_loop.ranks import all_ranks, decided_by_rank_zero, from_rank_zero, warn_together
from titan_loop.recipes.on_disk import (
    check_resumable,
    fetch_checkpoints,
    is_to_be_trained,
)
from titan_loop.recipes.preflight import (
    carry_refusals,
    parent_refusals,
    repetition_refusals,
    saved_state,
)
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.runs.run_directory import COMPILE_CACHE, RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import RECIPE_JSON, PlannedStage, write_plan
from titan_loop.storage.room import require_room, require_writable
from titan_loop.training.chosen_model import Newest, newest_of, saved_architecture
from titan_loop.training.config import RunConfig
from titan_loop.training.config_changes import setting_changes
from titan_loop.training.preflight import remarks
from titan_loop.training.resolved_run import ResolvedRun, resolve
from titan_loop.training.run import remote_of, run_training
from titan_loop.training.stability.recovery import SpikesError, rewind
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer


def run_recipe(
    recipe: Recipe,
    *,
    folder: str = "",
    only: str | None = None,
    stop_listener: StopListener | None = None,
) -> None:
    """Train the stages that are not complete; call it on every rank the launcher started.

    Args:
        only: Name of the only stage to train. The flags of this start do not apply to the other
            stages, whose settings come from their run directories.

    Raises:
        UserError: Before anything starts; later only if a parent ended before its last token.
        NonFiniteError: Training stopped, see `titan_loop.training.verdict`.
        StoppedError: A signal stopped it, see `titan_loop.training.stop_request`.
    """
    rank, world_size = compat.start_runtime()
    compat.start_logging(rank)
    recipe.check()
    root = recipe.place(folder)
    stages = recipe.chosen(only)
    # On every rank, since a node may lack the mount, or have it read-only.
    for place in dict.fromkeys([root, *(Path(stage.config.dump_folder) for stage in stages)]):
        require_writable(place, f"dump_folder={place}")

    def look() -> dict[str, tuple[int, Trainable]]:
        require_room(root, 0)  # a checkpoint that is fetched needs some
        for stage in recipe.stages:
            fetch_checkpoints(stage.config)  # before the checks, which read the newest checkpoints
        check_placed(recipe, world_size, only=only)
        return {s.name: (s.config.total_tokens, s.config.trainable) for s in recipe.stages}

    # Rank 0 alone reads run directories, so that all ranks agree.
    for name, recorded in decided_by_rank_zero(look).items():
        config = recipe.stage(name).config
        config.total_tokens, config.trainable = recorded
    keep_compiled_code(root / COMPILE_CACHE)
    # A start of one stage keeps the plan: its flags are not the other stages'.
    keeps_plan = only is not None and (root / RECIPE_JSON).exists()
    if rank == 0 and len(recipe.stages) > 1 and not keeps_plan:
        planned = [  # a fork needs no other stage of its recipe in its folder
            PlannedStage(s.name, s.parent, s.config.total_tokens, s.control)
            for s in (stages if recipe.is_fork else recipe.stages)
        ]
        name, *flags = recipe.words or (recipe.name,)
        write_plan(root, name, planned, flags=flags if only is None else ())
    layouts = KeptLayouts()
    try:
        for number, stage in enumerate(stages, start=1):
            if len(recipe.stages) > 1:
                logger.info("Stage %s (%d of %d)", stage.name, number, len(stages))
            decided_by_rank_zero(lambda stage=stage: raise_first(parent_refusals(recipe, stage)))
            start(stage.config, layouts=layouts, stop_listener=stop_listener)
            forget_compiled_stage()
            gc.collect()  # torchtitan turns automatic collection off; a model has cycles
    finally:
        shutdown()  # may wait for ranks that wait for this one; StopListener.leave ends the wait


def start(
    config: RunConfig,
    *,
    layouts: KeptLayouts | None = None,
    stop_listener: StopListener | None = None,
) -> None:
    """Train one run to its end, starting again after each rewind; collective.

    The process group stays for the next run of a recipe: call `shutdown` after the last. Raises as
    `run_recipe` does, and `UnstableError` if spikes go on after every rewind.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        compat.skip_final_pause()
    layouts = layouts or KeptLayouts()
    while True:
        # Rank 0 alone looks: ranks that see different checkpoints would train different models.
        saved, goes_on = decided_by_rank_zero(lambda: _look(config, world_size))
        if not goes_on:
            logger.info("Nothing left to train in %s", config.dump_folder)
            return
        run = resolve(config, world_size, saved)
        try:
            callbacks = evaluations(config)
            run_training(run, callbacks, layouts=layouts, stop_listener=stop_listener)
            return
        except SpikesError as error:
            spikes = error.spikes  # without the error, whose traceback holds the trainer
        gc.collect()
        forget_compiled_stage()
        decide = partial(
            rewind,
            RunDirectory(config.dump_folder),
            remote_of(config),
            spikes,
            config.stability,
        )
        if stop := from_rank_zero(all_ranks(), decide):
            raise UnstableError(stop)


def _look(config: RunConfig, world_size: int) -> tuple[Mapping[str, Any], bool]:
    """Return the architecture of the weights to start from, and whether anything is left to do."""
    fetch_checkpoints(config)  # first: a rewind or a copy changes which checkpoint is the newest
    newest = newest_of(config)
    saved = saved_architecture(config, newest)
    run = resolve(config, world_size, saved)
    goes_on = is_to_be_trained(run, newest)
    if not goes_on and (found := newest()) is not None and not found[1]["stage_end"]:
        for change in setting_changes(run.config):  # such as a flag of the last start left out
            logger.warning("changed since the last start: %s", change)
        if limit := config.training.steps:
            logger.warning("training.steps=%d ends the run before its last token", limit)
    return saved, goes_on


def shutdown() -> None:
    """Leave the process group, if there is one, after the last run of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_placed(recipe: Recipe, world_size: int, *, only: str | None = None) -> list[Stage]:
    """Check a recipe whose configs have their folders; return the stages to train.

    Touches no process group and no device. Warns of settings that are legal but probably mistakes.
    """
    stages = recipe.chosen(only)
    if only is not None:
        for stage in recipe.stages:
            if stage not in stages:
                _adopt_recorded(stage.config)
        raise_first(parent_refusals(recipe, stages[0]))
    checked: dict[str, ResolvedRun] = {}
    newest = {stage.name: newest_of(stage.config) for stage in recipe.stages}
    for stage in stages:
        checked[stage.name] = _check(recipe, stage, world_size, checked, newest)
        _warn_of_same_windows(recipe, stage)
    # A remark that all stages share is logged once.
    for remark in dict.fromkeys(text for stage in stages for text in remarks(stage.config)):
        warn_together(logger, "%s", remark)
    return stages


def is_complete(config: LoopTrainer.Config) -> bool:
    """Return whether a placed run has a checkpoint that covers all its tokens."""
    state = saved_state(config)
    return state is not None and state["tokens"] >= config.total_tokens


def _adopt_recorded(config: LoopTrainer.Config) -> None:
    if RunDirectory(config.dump_folder).config_json.exists():
        recorded = SavedRun(config.dump_folder)
        config.total_tokens = recorded.total_tokens
        if recorded.trainable is not None:
            config.trainable = recorded.trainable
        if recorded.optimizer:
            config.optimizer.name = recorded.optimizer


def _check(
    recipe: Recipe,
    stage: Stage,
    world_size: int,
    checked: Mapping[str, ResolvedRun],
    newest: Mapping[str, Newest],
) -> ResolvedRun:
    try:
        saved = saved_architecture(stage.config, newest[stage.name])
        before = checked.get(stage.parent or "")
        if not saved and before is not None:
            saved = before.architecture  # which the parent's checkpoints will have
        run = resolve(stage.config, world_size, saved)
        raise_first(suite_refusals(stage.config))
        started = newest[stage.name]() is not None
        if stage.parent is None or started:
            check_resumable(run, newest[stage.name])  # includes a parent outside the recipe
        else:
            parent = recipe.stage(stage.parent)
            if (found := newest[parent.name]()) is not None:
                trained = found[1]["trainer"]["architecture"]
            else:
                trained = (before or resolve(parent.config, world_size)).architecture
            raise_first(carry_refusals(stage, parent, wanted=run.architecture, trained=trained))
        if len(recipe.stages) > 1 and not started:
            raise_first(repetition_refusals(stage))
    except UserError as error:
        if len(recipe.stages) == 1:
            raise
        raise UserError(f"stage {stage.name}: {error}") from error
    return run


def _warn_of_same_windows(recipe: Recipe, stage: Stage) -> None:
    if stage.parent is None:
        return
    parent = recipe.stage(stage.parent).config
    here, before = (config.dataloader.to_dict() for config in (stage.config, parent))
    shared = set(stage.config.dataloader.source_paths()) & set(parent.dataloader.source_paths())
    same_windows = stage.config.training.seq_len == parent.training.seq_len
    if shared and same_windows and here.get("seed") == before.get("seed"):
        warn_together(
            logger,
            f"stage {stage.name} reads the same windows in the same order as {stage.parent}, from "
            f"{', '.join(sorted(shared))}; give it another dataloader.seed",
        )
