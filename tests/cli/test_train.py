"""`titan-loop train` hands each stage of a recipe to the trainer, with the flags applied."""

from pathlib import Path

import pytest

from titan_loop.checkpoint.saving import SaveFailedError
from titan_loop.cli import main
from titan_loop.errors import EXIT_NON_FINITE, EXIT_OK, NonFiniteError
from titan_loop.models.family import decoder_config
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.trainer import LoopTrainer


@pytest.fixture
def trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shutdowns: list[int]
) -> list[LoopTrainer.Config]:
    """Return the configs that reached the trainer; `total_tokens` = 3 or 4 fails."""
    monkeypatch.chdir(tmp_path)  # a recipe's folder gets its plan
    configs: list[LoopTrainer.Config] = []

    def record(config: LoopTrainer.Config, **_: object) -> None:
        configs.append(config)
        if config.total_tokens == 3:
            raise NonFiniteError("10 steps")
        if config.total_tokens == 4:
            raise SaveFailedError("step-4 was not saved: No space left on device")

    def recipe(name: str) -> Recipe:
        if name != "pair":
            return Recipe.of_one_run(name, LoopTrainer.Config(dump_folder="runs/one"))
        stages = [Stage(name=stage, config=LoopTrainer.Config()) for stage in ("a", "b")]
        return Recipe(name="pair", stages=stages)

    monkeypatch.setattr("titan_loop.cli.stage_flags.load_recipe", recipe)
    monkeypatch.setattr("titan_loop.recipes.start.start", record)
    monkeypatch.setattr("titan_loop.recipes.start.shutdown", lambda: shutdowns.append(len(configs)))
    monkeypatch.setattr(
        "titan_loop.recipes.start.resolve",
        lambda config, world_size, saved=None: ResolvedRun(
            config, decoder_config(config.model, max_seq_len=32), asked=config.model
        ),
    )
    monkeypatch.setattr("titan_loop.recipes.start.remarks", lambda config: ())
    monkeypatch.setattr(LoopTrainer.Config, "open_data", lambda self: None)
    return configs


@pytest.fixture
def shutdowns() -> list[int]:
    """Return, for every time the process group was left, the runs trained before."""
    return []


def test_one_stage_can_be_trained_alone(trained, capsys):
    assert main.main(["train", "pair", "--stage", "b", "--total-tokens", "7"]) == EXIT_OK
    assert [(config.stage, config.total_tokens) for config in trained] == [("b", 7)]
    assert main.main(["train", "pair", "--stage", "c"]) == 2
    assert "recipe pair has no stage 'c'; known: a, b" in capsys.readouterr().err
    assert main.main(["train", "pair", "--stage"]) == 2
    assert "Missing value for argument '--stage'" in capsys.readouterr().err


def test_a_run_that_fails_ends_the_recipe(trained, shutdowns):
    assert main.main(["train", "pair", "--total-tokens", "3"]) == EXIT_NON_FINITE
    assert (len(trained), shutdowns) == (1, [1])


def test_a_last_save_that_fails_is_one_line(trained, shutdowns, capsys):
    assert main.main(["train", "pair", "--total-tokens", "4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("titan-loop: error: step-4 was not saved: No space left on device; ")
    assert (len(trained), shutdowns) == (1, [1])


def test_a_start_of_one_stage_keeps_the_plan_of_all(trained, tmp_path):
    assert main.main(["train", "pair", "--total-tokens", "7"]) == EXIT_OK
    plan = tmp_path / "runs" / "pair" / "recipe.json"
    before = plan.read_text()
    assert '"7"' in before
    assert main.main(["train", "pair", "--stage", "a", "--total-tokens", "9"]) == EXIT_OK
    assert plan.read_text() == before
