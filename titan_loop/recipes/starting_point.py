"""`train --from`: the first stages of a recipe start from a run, a checkpoint, or an import."""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from titan_loop.checkpoint.start_from import has_moments
from titan_loop.errors import UserError, seen_from
from titan_loop.formats.importing import CONFIG, ModelFolder, import_run
from titan_loop.launcher import is_in_step
from titan_loop.models.family import OF_A_START
from titan_loop.recipes.recipe import Recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun

IMPORTED = "imported"
"""Run in a recipe's folder that holds an imported model."""


def start_from(
    recipe: Recipe, path: Path, *, only: str | None, folder: str, command: Sequence[str]
) -> SavedRun:
    """Let a recipe's first stages, or stage `only`, start from a model; apply flags afterwards.

    These stages, and all stages with the same model config, get the model's shape, vocabulary and
    RoPE base, with the first stage's attention, readout_chunk_tokens and dropout.

    Args:
        path: A run, a checkpoint, or a folder that `convert import` reads. The last is imported
            into the recipe's folder once.
    """
    if not path.is_dir():
        raise UserError(
            f"--from {path} is not a folder{seen_from(path)}; give a run, a checkpoint or a folder "
            "that convert export wrote"
        )
    if (path / CONFIG).exists() and not RunDirectory(path).run_json.exists():
        path = _import_once(
            ModelFolder(path), Path(folder or recipe.folder or f"runs/{recipe.name}"), command
        )
    run = SavedRun.open(path)
    first = [stage for stage in recipe.chosen(only) if only or stage.parent is None]
    own = first[0].config.model
    shared = {field.name for field in fields(own)} & {f.name for f in fields(run.model_options)}
    kept = {name: getattr(own, name) for name in OF_A_START & shared}
    for stage in recipe.stages:
        if stage in first or stage.config.model == own:
            stage.config.model = replace(run.model_options, **kept)
    for stage in first:
        stage.config.checkpoint.carry.parent = str(path)
        stage.config.checkpoint.carry.optimizer &= has_moments(run.checkpoint().path)
    return run


def check_tokenizer(recipe: Recipe, run: SavedRun, *, only: str | None) -> None:
    """Refuse data whose tokenizer differs from the tokenizer of the run to start from."""
    for stage in recipe.chosen(only):
        for source in stage.config.dataloader.source_paths():
            run.check_source(Path(source))


def _import_once(model: ModelFolder, folder: Path, command: Sequence[str]) -> Path:
    output = folder / IMPORTED
    if RunDirectory(output).run_json.exists():
        lineage = SavedRun(output).checkpoint().manifest["lineage"]
        if lineage.get("config_sha256") != model.lineage()["config_sha256"]:
            raise UserError(
                f"--from {model.path}: {output} holds another model, from "
                f"{lineage.get('imported_from')}; choose another --dump-folder"
            )
        return output
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or is_in_step():
        raise UserError(
            f"--from {model.path}: several ranks cannot import it; run titan-loop convert import "
            f"{model.path} --output {output} first"
        )
    import_run(model, output, command, dtype=torch.float32)
    return output
