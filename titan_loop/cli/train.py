"""`titan-loop train RECIPE [--FLAG VALUE …]`: alone, or as one of a launcher's ranks."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated

import tyro

from titan_loop.cli.arguments import command
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import EXIT_INTERRUPTED, EXIT_OK, RunFailedError, StoppedError
from titan_loop.training.stop_request import StopListener, grace_seconds

if TYPE_CHECKING:
    from titan_loop.recipes.recipe import Recipe


@command("train")
def run(
    recipe: str,
    flags: Sequence[str],
    *,
    stage: str | None = None,
    dump_folder: str = "",
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
) -> int:
    """Train a recipe, or continue it in its folder from the last checkpoint there.

    A recipe of several stages trains its incomplete ones in order, each in DUMP_FOLDER/STAGE.
    Every field of the config is a flag, which titan-loop train RECIPE --help lists: --FIELD applies
    to all stages, --stages.NAME.FIELD to one. Activation checkpointing is chosen by
    activation-checkpoint:KIND after the flags.

    For example:
      titan-loop train quickstart --total-tokens 200000 --dump-folder runs/short
      titan-loop train quickstart --learning-rate '0:0 linear 80K:3e-3 cosine 1600K:3e-4'
      titan-loop train miniature --stages.1b.total-tokens 50000 --stages.gate.loss.slope 20
      titan-loop train quickstart --from exported --dataloader.mixture sources/my=1
      titan-loop train runs/quickstart                        # goes on with the run's own settings
      titan-loop train runs/quickstart/config.json            # the same run, once more
      torchrun --nproc-per-node 2 -m titan_loop train quickstart --training.local-batch-size 2

    Args:
        recipe: Name that `titan-loop recipes` lists, PACKAGE.MODULE:FUNCTION, the folder of a run,
            which goes on, or its config.json, which is trained again in a folder beside it.
        stage: Train this stage alone, from its parent in DUMP_FOLDER or from
            --checkpoint.carry.parent CHECKPOINT.
        dump_folder: Folder of the recipe or run; by default the recipe's own.
        from_: Start from this model instead of initial weights, with its shape, vocabulary and RoPE
            base: a run, a checkpoint, or a folder as convert export writes it.
    """
    # Before torch is imported, which takes seconds: from here on a signal requests a stop.
    with StopListener(grace=grace_seconds(os.environ)) as stop_listener:
        parents = []

        def prepare(recipe: "Recipe") -> None:
            if from_ is not None:
                from titan_loop.recipes.starting_point import start_from

                parents.append(
                    start_from(recipe, from_, only=stage, folder=dump_folder, command=sys.argv)
                )
                name, *flags = recipe.words
                recipe.words = (name, "--from", str(from_), *flags)

        resolved = resolve_recipe(recipe, flags, only=stage, prepare=prepare)
        for parent in parents:
            from titan_loop.recipes.starting_point import check_tokenizer

            check_tokenizer(resolved, parent, only=stage)

        from titan_loop.checkpoint.saving import SaveFailedError
        from titan_loop.recipes.start import run_recipe

        try:
            run_recipe(resolved, folder=dump_folder, only=stage, stop_listener=stop_listener)
        except SaveFailedError as error:
            raise RunFailedError(
                f"{error}; free space or repair the storage, then start again to continue from "
                "the last checkpoint"
            ) from error
        except StoppedError as stop:
            if stop_listener.requested_by != SIGINT.name:
                raise
            print(f"titan-loop: {stop}", file=sys.stderr)
            return EXIT_INTERRUPTED
    return EXIT_OK
