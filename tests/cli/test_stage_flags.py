"""Flags for one stage of a recipe, beside those for all."""

import pytest

from titan_loop.cli.stage_flags import apply_to_stages
from titan_loop.errors import UserError
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


@pytest.fixture
def recipe() -> Recipe:
    names = ("1b", "1b.6", "mid_training")
    return Recipe(
        name="mine", stages=[Stage(name=name, config=LoopTrainer.Config()) for name in names]
    )


def tokens(recipe: Recipe) -> list[int]:
    return [stage.config.total_tokens for stage in recipe.stages]


def test_a_flag_for_one_stage_wins_over_one_for_all_wherever_it_stands(recipe):
    flags = "--stages.1b.total-tokens 5K --total-tokens 7 --stages.1b.6.total_tokens=9"
    apply_to_stages(recipe, flags.split(), "test")
    assert tokens(recipe) == [5000, 9, 7]


def test_any_field_of_a_stage_can_be_set(recipe):
    flags = [
        "--stages.mid-training.learning-rate",
        "0:0 linear 2M:0.0003",
        "--stages.mid-training.checkpoint.carry.no-optimizer",
        "--stages.mid-training.dataloader.mixture",
        "a=1,b=2:packed",
        "--stages.mid-training.loss.slope=20",
    ]
    with pytest.raises(UserError, match=r"stage mid_training: unknown flag --loss\.slope"):
        apply_to_stages(recipe, flags, "test")
    apply_to_stages(recipe, flags[:-1], "test")
    first, _, last = (stage.config for stage in recipe.stages)
    assert last.learning_rate == Schedule.parse("0:0 linear 2M:0.0003")
    assert last.dataloader.to_dict()["mixture"] == ["a=1", "b=2:packed"]
    assert not last.checkpoint.carry.optimizer
    assert first.checkpoint.carry.optimizer
    assert first.learning_rate == LoopTrainer.Config().learning_rate


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stages.1c.total-tokens", "5"], "--stages.1c.total-tokens does not begin with a stage; "
         "write --stages.STAGE.FIELD; nearest: 1b"),
        (["--stages.1b.", "5"], "--stages.1b. names no field of stage 1b; write --stages.1b.FIELD"),
        (["--stages.1b.total-token", "5"], "stage 1b: unknown flag --total-token; nearest: --tota"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(recipe, flags, message):
    with pytest.raises(UserError) as caught:
        apply_to_stages(recipe, flags, "test")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flag_for_a_stage_that_is_not_trained_is_refused(recipe):
    flags = ["--stages.1b.total-tokens", "5"]
    message = "--stages.1b.total-tokens has no effect with --stage mid_training"
    with pytest.raises(UserError, match=message):
        apply_to_stages(recipe, flags, "test", only="mid_training")
    apply_to_stages(recipe, ["--total-tokens", "5"], "test", only="mid_training")
    assert tokens(recipe)[2] == 5
    assert tokens(recipe)[0] == LoopTrainer.Config().total_tokens
