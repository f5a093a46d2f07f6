"""`titan-loop recipes`: the recipes that `train` finds by name, without importing any."""

from titan_loop.cli.arguments import command
from titan_loop.recipes.registry import recipe_summaries
from titan_loop.tables import columns


@command("recipes")
def run() -> None:
    """List the recipes that `titan-loop train` finds by name."""
    for line in columns(recipe_summaries().items(), left=(0, 1)):
        print(line)
    print("Your own: titan-loop train PACKAGE.MODULE:FUNCTION")
