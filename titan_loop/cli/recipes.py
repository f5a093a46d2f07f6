"""`titan-loop recipes`: the recipes that `train` finds by name, without importing any."""

from titan_loop.cli.arguments import command
from titan_loop.recipes.registry import recipes_by_study
from titan_loop.tables import columns


@command("recipes")
def run() -> None:
    """List the recipes that `titan-loop train` finds by name, by paper or study."""
    studies = recipes_by_study()
    lines = iter(columns((row for each in studies.values() for row in each.items()), left=(0, 1)))
    for study, recipes in studies.items():
        print(study)
        for _ in recipes:
            print(f"  {next(lines)}")
        print()
    print("Your own: titan-loop train PACKAGE.MODULE:FUNCTION")
