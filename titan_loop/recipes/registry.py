"""Finds recipes: `NAME` is a public function of that name in a folder of `train_configs`.

Its annotation says that it returns a `Recipe`, or the `LoopTrainer.Config` of one run.
`PACKAGE.MODULE:FUNCTION` names any other function; the path of a `config.json` repeats its run, and
the folder of a run goes on with it.
Names and summaries are parsed from the source files, because importing a recipe imports torch.
"""

import ast
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from titan_loop.errors import UserError, nearest
from titan_loop.plugins import import_user_module, studies

if TYPE_CHECKING:
    from titan_loop.recipes.recipe import Recipe

_FIRST = ("quickstart", "depth_demo", "nanbeige", "miniature")
"""Studies that a newcomer looks at first, in this order."""

_RETURNED = ("Recipe", "LoopTrainer.Config")


class _Found(NamedTuple):
    module: str
    summary: str
    study: str


def recipe_summaries() -> dict[str, str]:
    """Return name → first line of the function's docstring, in alphabetical order."""
    return {name: found.summary for name, found in sorted(_find_recipes().items())}


def recipes_by_study() -> dict[str, dict[str, str]]:
    """Return first line of a module's docstring → its recipes, in its order, and their summaries.

    The studies for newcomers come first, then the others by name.
    """

    def place(found: _Found) -> tuple[int, str]:
        study = found.module.split(".")[-2]
        return _FIRST.index(study) if study in _FIRST else len(_FIRST), found.module

    grouped: dict[str, dict[str, str]] = {}
    for name, found in sorted(_find_recipes().items(), key=lambda item: place(item[1])):
        grouped.setdefault(found.study, {})[name] = found.summary
    return grouped


def _find_recipes() -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for package, folder in studies().items():
        for path in sorted(folder.glob("*.py")):
            recipes = _recipes_of(f"{package}.{path.stem}", path.read_text(encoding="utf-8"))
            for name, recipe in recipes:
                if name in found:
                    places = " and ".join(dict.fromkeys([found[name].module, recipe.module]))
                    raise UserError(f"two recipes are called {name}: in {places}; rename one")
                found[name] = recipe
    return found


@cache  # parsing all studies takes a tenth of a second, and some commands ask for many recipes
def _recipes_of(module: str, source: str) -> list[tuple[str, _Found]]:
    def summary(node: ast.FunctionDef | ast.Module) -> str:
        return (ast.get_docstring(node) or "").partition("\n")[0]

    tree = ast.parse(source)
    return [
        (node.name, _Found(module, summary(node), summary(tree)))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and node.returns is not None
        and ast.unparse(node.returns) in _RETURNED
    ]


def load_recipe(name: str) -> "Recipe":
    """Return a recipe whose stages fit together.

    Args:
        name: A name of `recipe_summaries`, `PACKAGE.MODULE:FUNCTION` of a function without
            arguments, the path of a run's `config.json`, or a run's folder.
    """
    is_folder = Path(name).is_dir() and name not in _find_recipes()
    if name.endswith(".json") or is_folder:
        from titan_loop.recipes.recorded import recorded_recipe

        return recorded_recipe(
            _config_of(Path(name)) if is_folder else Path(name), goes_on=is_folder
        )
    module, function_name = _open(name)
    function = vars(module).get(function_name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if isfunction(value)]
        raise UserError(
            f"recipe {name!r}: {module.__name__} has no function {function_name!r}"
            + nearest(function_name, functions)
        )
    result = function()
    from titan_loop.recipes.recipe import Recipe
    from titan_loop.training.trainer import LoopTrainer

    if isinstance(result, LoopTrainer.Config):
        result = Recipe.of_one_run(function_name, result)
    if not isinstance(result, Recipe):
        kind = type(result).__name__
        raise UserError(f"recipe {name!r} returns {kind}; return a LoopTrainer.Config or a Recipe")
    result.check()
    return result


def _config_of(folder: Path) -> Path:
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.runs.status import read_plan

    if plan := read_plan(folder):
        raise UserError(
            f"{folder} holds the stages of a recipe; give the recipe's name with --dump-folder "
            f"{folder}, or one stage that has begun, such as {folder / plan[0].name}"
        )
    path = RunDirectory(folder).config_json
    if not path.exists():
        raise UserError(f"{folder} is neither a recipe nor a run; give a name or a run's folder")
    return path


def recipe_module(name: str) -> ModuleType:
    """Return the module that defines a recipe, by its name as for `load_recipe`."""
    return _open(name)[0]


def _open(name: str) -> tuple[ModuleType, str]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        known = _find_recipes()
        if name not in known:
            if "/" in name:
                raise UserError(f"{name} is not a folder; give a run's folder, or a recipe's name")
            raise UserError(f"unknown recipe {name!r}{nearest(name, known)}")
        module_name, function_name = known[name].module, name
    elif not module_name or not function_name or module_name.startswith("."):
        raise UserError(f"recipe {name!r} must be NAME or PACKAGE.MODULE:FUNCTION")
    import titan_loop.compat  # noqa: F401  a recipe may import torchtitan before anything of ours

    fix = "give it as PACKAGE.MODULE:FUNCTION, importable from the current folder"
    return import_user_module(module_name, f"recipe {name!r}", fix), function_name
