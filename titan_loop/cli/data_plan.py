"""`titan-loop data plan RECIPE`: whether the prepared data fills every stage of a recipe."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_loop.errors import UserError, raise_first
from titan_loop.recipes.registry import load_recipe

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer

USAGE = """usage: titan-loop data plan RECIPE [--FLAG VALUE ...]

Prints for every stage of RECIPE the tokens needed and available, epochs and disk size of each
source. Ends with code 2 if repetition caps leave a stage without data. Flags are `train`'s."""

_HEADER = ("source", "needed", "available", "epochs", "most", "GB on disk")


def plan(arguments: Sequence[str]) -> None:
    """Compare the tokens a recipe needs with those prepared.

    Raises:
        UserError: With all that keeps stages from being planned or filled, after the tables of the
            others were printed.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    name, *overrides = arguments
    if name.startswith("-"):
        raise UserError(f"data plan: the recipe comes first, before {name}")
    recipe = load_recipe(name)

    from titan_loop.cli.stage_flags import apply_to_stages

    apply_to_stages(recipe, overrides, f"titan-loop data plan {name}")
    shortages: list[str] = []
    for stage in recipe.stages:
        try:
            shortage = _plan_stage(stage.name, stage.config)
        except UserError as error:
            shortage = str(error)
        if shortage:
            shortages.append(f"{stage.name}: {shortage}")
    if shortages:
        raise UserError("; ".join(shortages))


def _plan_stage(name: str, config: "LoopTrainer.Config") -> str:
    """Print one stage's table; return why it cannot be filled, empty if it can."""
    from titan_loop.data.load.loader import WindowLoader
    from titan_loop.training.preflight import value_refusals

    raise_first(value_refusals(config))
    windows = config.windows_of_the_run()
    seq_len = config.training.seq_len
    print(f"{name}: {windows * seq_len:,} tokens in {windows:,} windows of {seq_len}")
    loader = config.open_data()
    if not isinstance(loader, WindowLoader):
        print("  generated or streamed: nothing to compare with")
        return ""
    try:
        loader.require_windows(windows)
        shortage = ""
    except UserError as error:
        shortage = str(error)
    rows: list[tuple[str, ...]] = [_HEADER]
    size_bytes = 0
    for row in loader.demand(windows):
        size_bytes += row.disk_bytes
        rows.append(
            (
                row.name,
                f"{row.needed_tokens:,}",
                f"{row.available_tokens:,}",
                f"{row.epochs:.3f}",
                "-" if row.max_epochs is None else str(row.max_epochs),
                f"{row.disk_bytes / 1e9:.3f}",
            )
        )
    rows.append(("all", "", "", "", "", f"{size_bytes / 1e9:.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        print("  " + "  ".join([first.ljust(widths[0]), *cells]))
    return shortage
