"""`titan-loop train RECIPE [--FLAG VALUE …]`: alone, or as one of a launcher's ranks."""

import os
from collections.abc import Sequence

from titan_loop.errors import EXIT_OK, RunFailedError, UserError
from titan_loop.recipes.registry import load_recipe, recipe_summaries
from titan_loop.training.stop_request import StopListener, grace_seconds

USAGE = """usage: titan-loop train RECIPE [--FLAG VALUE ...] [activation-checkpoint:KIND]

Trains RECIPE, or continues it in its --dump-folder from the last checkpoint there.
A recipe of several stages trains what remains of them in order, each in DUMP_FOLDER/STAGE. Flags
then apply to each, --stages.NAME.FLAG to one; --stage NAME trains one alone, from its parent in
DUMP_FOLDER or from --checkpoint.carry.parent CHECKPOINT.
Every field of the config can be set: titan-loop train RECIPE --help lists them.

recipes: {recipes}, or PACKAGE.MODULE:FUNCTION
examples:
  titan-loop train quickstart --total-tokens 200000 --dump-folder runs/short
  titan-loop train quickstart --learning-rate '0:0 linear 80K:3e-3 cosine 1600K:3e-4'
  titan-loop train miniature --stages.1b.total-tokens 50000 --stages.gate.loss.slope 20
  torchrun --nproc-per-node 2 -m titan_loop train quickstart --training.local-batch-size 2"""


def run(arguments: Sequence[str]) -> int:
    """Train; returns the exit code of the run."""
    recipes = ", ".join(recipe_summaries())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(recipes=recipes))
        return EXIT_OK
    name, *flags = arguments
    if name.startswith("-"):
        raise UserError(f"train: the recipe comes first, before {name}; known: {recipes}")
    # From here on a signal asks to stop; importing torch takes seconds.
    with StopListener(grace=grace_seconds(os.environ)) as stop_listener:
        return _train(name, flags, stop_listener)


def _train(name: str, flags: list[str], stop_listener: StopListener) -> int:
    recipe = load_recipe(name)

    from titan_loop.checkpoint.saving import SaveFailedError
    from titan_loop.cli.overrides import take_flag
    from titan_loop.cli.stage_flags import apply_to_stages
    from titan_loop.recipes.runner import run_recipe

    flags, only = take_flag(flags, "--stage")
    flags, folder = take_flag(flags, "--dump-folder")
    apply_to_stages(recipe, flags, f"titan-loop train {name}", only=only)
    if only is not None and recipe.stage(only).config.checkpoint.carry.parent:
        recipe.stage(only).parent = None  # a fork
    try:
        run_recipe(recipe, folder=folder or "", only=only, stop_listener=stop_listener)
    except SaveFailedError as error:
        raise RunFailedError(
            f"{error}; make room or repair it, and start again to go on from the last checkpoint"
        ) from error
    return EXIT_OK
