"""Recipes are listed without being imported, and found by name or as module:function."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.recipes.registry import load_recipe, recipe_summaries, recipes_by_study

RECIPES = """
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.trainer import LoopTrainer
def one(): return LoopTrainer.Config(total_tokens=5)
def two(): return Recipe(name="two", stages=[Stage(name="a", config=one()),
    Stage(name="b", parent="a", config=LoopTrainer.Config(total_tokens=6))])
def none(): return Recipe(name="none", stages=[])
def number(): return 3
"""


@pytest.fixture
def own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_recipes.py").write_text(RECIPES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_recipes", raising=False)
    return "own_recipes"


def test_every_recipe_of_the_package_has_a_summary_and_loads():
    summaries = recipe_summaries()
    assert "quickstart" in summaries
    for name, summary in summaries.items():
        assert summary, name
        assert load_recipe(name).stages


def test_recipes_are_listed_by_study_and_the_quick_start_first(capsys):
    studies = recipes_by_study()
    assert next(iter(studies)).startswith("The quick start:")
    assert next(iter(studies[next(iter(studies))])) == "quickstart"
    assert all(studies)  # every module says what it is about
    listed = [name for recipes in studies.values() for name in recipes]
    assert sorted(listed) == [*recipe_summaries()]
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == listed
    assert [line for line in lines if line in studies] == [*studies]


def test_a_recipe_in_the_working_folder_is_found(own_recipes):
    one, two = load_recipe(f"{own_recipes}:one"), load_recipe(f"{own_recipes}:two")
    assert [stage.config.total_tokens for stage in one.stages] == [5]
    assert [stage.config.total_tokens for stage in two.stages] == [5, 6]
    assert [stage.parent for stage in two.stages] == [None, "a"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("onee", "has no function 'onee'; nearest: one"),
        ("none", "recipe none has no stage"),
        ("number", "returns int; return a LoopTrainer.Config"),
    ],
)
def test_what_is_no_recipe_is_refused(own_recipes, function, message):
    with pytest.raises(UserError, match=message):
        load_recipe(f"{own_recipes}:{function}")


@pytest.mark.parametrize("name", [":f", "module:", ":", ".module:f"])
def test_a_name_with_a_part_missing_is_refused(name: str):
    with pytest.raises(UserError, match=r"must be NAME or PACKAGE\.MODULE:FUNCTION"):
        load_recipe(name)


def test_a_recipe_with_a_missing_import_is_a_defect_of_the_recipe(own_recipes, tmp_path):
    (tmp_path / "own_recipes.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(ModuleNotFoundError):
        load_recipe(f"{own_recipes}:one")


FIRST_IMPORT = """
from torchtitan.distributed.parallel_dims import device_type
from titan_loop.training.trainer import LoopTrainer
def one(): return LoopTrainer.Config(dump_folder=device_type)
"""
LOAD = """
from titan_loop.recipes.registry import load_recipe
print(load_recipe("importing_first:one").stages[0].config.dump_folder)
"""


def test_a_recipe_may_import_torchtitan_first(tmp_path: Path):
    (tmp_path / "importing_first.py").write_text(FIRST_IMPORT)
    command = [sys.executable, "-c", LOAD]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert printed.stdout.split()[-1] == ("cuda" if torch.cuda.is_available() else "cpu")
