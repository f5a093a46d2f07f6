"""Recipes are listed without being imported, and found by name or as module:function."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.multiprocess import preloaded_context
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.plugins import find, names
from titan_loop.recipes import registry
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


def test_recipes_are_listed_by_study_and_the_quick_start_first(capsys):
    studies = recipes_by_study()
    assert next(iter(studies)).startswith("The quick start:")
    assert next(iter(studies[next(iter(studies))])) == "quickstart"
    assert all(studies)  # every module says what it is about
    listed = [name for recipes in studies.values() for name in recipes]
    assert sorted(listed) == [*recipe_summaries()]
    assert all(recipe_summaries().values())
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


@pytest.mark.parametrize("files", [["a", "a"], ["a", "b"]])
def test_two_recipes_of_one_name_are_refused(monkeypatch, tmp_path: Path, files):
    for name in files:
        with (tmp_path / f"{name}.py").open("a") as module:
            module.write("def same() -> Recipe: ...\n")
    monkeypatch.setattr(registry, "studies", lambda: {"study": tmp_path})
    places = " and ".join(f"study.{name}" for name in dict.fromkeys(files))
    with pytest.raises(UserError, match=f"^two recipes are called same: in {places}; rename one$"):
        recipe_summaries()


def open_a_study(folder: Path, answer: Connection) -> None:
    """Be the console script in a folder: it is not on the path until a recipe is opened."""
    root = Path(__file__).parents[2]
    sys.path[:] = [each for each in sys.path if each and Path(each) != root] + [str(root)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "train_configs"]:
        del sys.modules[name]
    os.chdir(folder)
    load_recipe("adaptive_small")
    answer.send((len(names("tasks")), find("tasks", "mano_capo").__module__))


def test_studies_are_ours_whatever_the_current_folder_holds(tmp_path: Path):
    foreign = tmp_path / "train_configs" / "adaptive"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("raise RuntimeError('foreign code')")
    context = preloaded_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=open_a_study, args=(tmp_path, sender))
    process.start()
    sender.close()
    count, module = receiver.recv()
    process.join()
    assert count > 10
    assert module == "train_configs.adaptive.task"


def test_the_path_of_a_run_that_is_not_there_is_said_to_be_none(tmp_path: Path):
    with pytest.raises(UserError, match="runs/none is not a folder; give a run's folder"):
        load_recipe(f"{tmp_path}/runs/none")
