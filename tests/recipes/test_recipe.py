"""Stages fit together: names, parents, folders."""

import pytest

from titan_loop.errors import UserError
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.trainer import LoopTrainer


def stage(name: str, parent: str | None = None) -> Stage:
    return Stage(name=name, parent=parent, config=LoopTrainer.Config())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "has no stage"),
        ([stage("a"), stage("a")], "stage 'a' is there twice; rename one"),
        ([stage("a/b")], "stage 'a/b' cannot name a folder"),
        ([stage("")], "cannot name a folder"),
        ([stage("annealing"), stage("b", "anealing")], "does not exist; nearest: annealing"),
        ([stage("a", "b"), stage("b", "a")], "does not run before it: reorder them"),
        ([stage("a", "a")], "does not run before it: reorder them"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages, message):
    with pytest.raises(UserError, match=message) as caught:
        Recipe(name="mine", stages=stages).check()
    assert str(caught.value).startswith("recipe mine")


def test_every_stage_has_a_folder_and_knows_its_parents():
    recipe = Recipe(name="mine", stages=[stage("a"), stage("b", "a"), stage("fork", "a")])
    recipe.check()
    recipe.place()
    assert [s.config.dump_folder for s in recipe.stages] == [
        "runs/mine/a",
        "runs/mine/b",
        "runs/mine/fork",
    ]
    assert [s.config.checkpoint.carry.parent for s in recipe.stages] == [
        "",
        "runs/mine/a",
        "runs/mine/a",
    ]
    assert [s.config.stage for s in recipe.stages] == ["a", "b", "fork"]
