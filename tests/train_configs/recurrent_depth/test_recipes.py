"""Recurrent depth: the published settings, what differs between stages, a little training."""

import json
import math
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.registry import load_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from train_configs.recurrent_depth.curriculum import CurriculumLoader


def drawn(recipe: Recipe, stage: str, steps: int = 400) -> set[int]:
    (config,) = [s.config for s in recipe.stages if s.name == stage]
    return {config.plan_step(step=n, tokens=0, seed=0).recurrent_steps for n in range(1, steps)}


def test_the_published_stages_differ_in_r_alone():
    systematic = load_recipe("recurrent_depth_systematic")
    assert {stage.name: drawn(systematic, stage.name) for stage in systematic.stages} == {
        f"r{steps}": {steps} for steps in (1, 2, 4, 8)
    }
    extrapolation = load_recipe("recurrent_depth_extrapolation")
    assert drawn(extrapolation, "dynamic") == set(range(2, 9))
    assert {stage.name for stage in extrapolation.stages} == {
        "dynamic", *(f"r{steps}" for steps in range(1, 9))
    }  # fmt: skip
    for stage in (*systematic.stages, *extrapolation.stages):
        config = stage.config
        batch = config.batch.global_batch_tokens(0)
        assert config.learning_rate(10**9) == 1e-4
        assert config.learning_rate(1_000 * batch) == pytest.approx(0.5e-4)
        assert config.adamw.weight_decay == 0.01
        examples = batch / config.training.seq_len
        assert examples == (512 if stage in systematic.stages else 128)


@pytest.mark.parametrize("kind", ["systematic", "extrapolation"])
def test_the_published_stages_start_and_are_examined_as_in_the_authors_code(kind: str):
    for code in ("", "_code"):
        for stage in load_recipe(f"recurrent_depth_{kind}{code}").stages:
            config, model, loader = stage.config, stage.config.model, stage.config.dataloader
            assert isinstance(model, RecurrentDepthOptions)
            assert isinstance(loader, TaskLoader.Config)
            assert model.initial_tables == "unit"
            assert model.tie_weights
            assert config.training.max_norm == math.inf
            assert isinstance(loader, CurriculumLoader.Config) == (kind == "extrapolation")
            if isinstance(loader, CurriculumLoader.Config):
                curriculum = loader.curriculum
                assert (curriculum.interval, curriculum.accuracy, curriculum.strict) == (0, 0.95, 1)
                dynamic = stage.name == "dynamic"
                assert curriculum.exit == ("kl:0.5,3.24" if dynamic else "")
                assert curriculum.recurrent_steps == (8 if dynamic else int(stage.name[1:]))
                assert loader.task.level_examples(3) == 2_000 + 4 * 15_000  # up to five hops


@pytest.mark.usefixtures("alone")
def test_the_short_form_trains_examines_and_analyses(tmp_path: Path, capfd):
    run = tmp_path / "run"
    half = ["--training.steps", "8", "--suite.interval", "8"]
    half += ["--stages.depth.dataloader.curriculum.interval", "4"]
    assert main(["train", "recurrent_depth_short", "--dump-folder", str(run), *half]) == 0
    evaluations = read_jsonl(RunDirectory(run / "depth").evals_jsonl)
    asked = [record["asked"] for record in evaluations]
    assert asked.count("promotion") == 2  # both passed: accuracy 0 is asked for
    assert "permutation_hops/16_hops/acc,none/static:12" in evaluations[-2]["results"]
    capfd.readouterr()
    steps = ["analyse", "steps", str(run / "depth"), "--exit", "kl:0.01,1.5", "--questions", "4"]
    assert main(steps) == 0
    told = capfd.readouterr().out
    assert "passed in training 3, reached " in told  # facts, two hops and three
    assert "generalisation ratio" in told
    record = json.loads((run / "depth" / "evals" / "steps-step-8.json").read_text())
    assert (record["trained_steps"], record["passed_in_training"]) == (8, 3)
    assert len(record["strata"]["16_hops"]["accuracy"]) == 16
    assert main(["analyse", "lens", str(run / "systematic"), "--questions", "4"]) == 0
    assert "bridge" in capfd.readouterr().out
