"""`titan-loop recipes`: the recipes `train` finds by name, without importing any."""

from collections.abc import Sequence

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK
from titan_loop.recipes.registry import recipe_summaries


def run(arguments: Sequence[str]) -> int:
    """Print a line for each recipe."""
    Parser("recipes", "List the recipes that `titan-loop train` finds by name.").parse(arguments)
    summaries = recipe_summaries()
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        print(f"{name:{width}}  {summary}")
    print("Your own: titan-loop train PACKAGE.MODULE:FUNCTION")
    return EXIT_OK
