"""`titan-loop results add | show`: small records of finished runs, and tables made from them."""

from pathlib import Path

from titan_loop.cli.arguments import group
from titan_loop.errors import UserError


def add(run: Path, *, folder: Path | None = None, unclean: bool = False) -> None:
    """Write the results of a finished run to results/RECIPE/STAGE-seedS.json, and print the path.

    The file holds flags, commit, machine, tokens, steps, seconds, losses, and everything that was
    evaluated at the last step; an older file of the same stage and seed is replaced.

    Args:
        run: Run directory.
        folder: Folder to write to; by default results/ beside the recipe's module.
        unclean: Accept a run of uncommitted code, or of a commit that is not in this checkout's
            history; tables mark it.
    """
    from titan_loop.analysis.results import RunResult
    from titan_loop.runs.run_directory import RunDirectory

    result = RunResult.of(RunDirectory(run))
    if result.unclean and not unclean:
        raise UserError(
            f"{run} was trained by commit {result.commit}, which is not in this checkout's history "
            "or had uncommitted changes; train it from a commit, or add it with --unclean"
        )
    print(result.save(folder or _beside(result.recipe)))


def show(recipe: str, *, folder: Path | None = None, no_plot: bool = False) -> None:
    """Print the tables that a recipe declares, beside the paper's numbers, and draw them.

    A cell is the mean over seeds with its 95 % interval. Differences between rows are paired by
    seed, and on held-out text by document; their intervals cover both. Tables without a result are
    left out.

    Args:
        recipe: Name that titan-loop recipes lists, or PACKAGE.MODULE:FUNCTION.
        folder: Folder of the results; by default results/ beside the recipe's module. Plots are
            written to plots/ beside this folder.
        no_plot: Print the tables without drawing them.
    """
    from titan_loop.analysis import results, results_plots
    from titan_loop.recipes.registry import recipe_module

    place = folder or _beside(recipe)
    name = results.short_name(recipe)
    tables = getattr(recipe_module(recipe), "TABLES", {}).get(name)
    if tables is None:
        raise UserError(
            f"recipe {recipe!r}: its module has no TABLES[{name!r}]; declare its tables"
        )
    found = results.RunResult.all_of(place / name)
    print(results.runs_text(found))
    if any(result.unclean for result in found):
        print(f"\n{results.UNCLEAN}: of uncommitted code, or a commit that is not in the history")
    for table in tables:
        if not table.has_any(found):
            continue
        print(f"\n{results.table_text(table, found)}")
        if table.less and (differences := results.differences_text(table, found)):
            print(f"\n{differences}")
        if no_plot:
            continue
        stem = place.parent / "plots" / f"{name}-{table.name}"
        print(f"\n{results_plots.draw_table(table, found, Path(f'{stem}.png'))}")
        if table.against_flops:
            print(results_plots.draw_against_flops(table, found, Path(f"{stem}-flops.png")))


def _beside(recipe: str) -> Path:
    from titan_loop.recipes.registry import recipe_module

    return Path(recipe_module(recipe).__file__ or "").parent / "results"


run = group("results", {"add": add, "show": show})
