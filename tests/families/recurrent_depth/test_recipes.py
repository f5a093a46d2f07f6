"""Recurrent depth: the published settings, what differs between stages, a little training."""

import json
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.registry import load_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl


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


def test_epochs_are_of_facts_and_trained_questions():
    (r4,) = [s.config for s in load_recipe("recurrent_depth_systematic").stages if s.name == "r4"]
    assert r4.total_tokens == 2_000 * (40_000 + 273_600) * 3


@pytest.mark.usefixtures("alone")
def test_the_short_form_trains_examines_and_analyses(tmp_path: Path, capfd):
    run = tmp_path / "run"
    assert main(["train", "recurrent_depth_short", "--dump-folder", str(run)]) == 0
    evaluations = read_jsonl(RunDirectory(run / "depth").evals_jsonl)
    asked = [record["asked"] for record in evaluations]
    assert asked.count("promotion") == 2  # both passed: accuracy 0 is asked for
    assert "permutation_hops/16_hops/acc,none/static:12" in evaluations[-2]["results"]
    capfd.readouterr()
    steps = ["analyse", "steps", str(run / "depth"), "--exit", "kl:0.01,1.5", "--questions", "4"]
    assert main(steps) == 0
    assert "generalisation ratio" in capfd.readouterr().out
    record = json.loads((run / "depth" / "evals" / "steps-step-16.json").read_text())
    assert record["trained_steps"] == 8
    assert len(record["strata"]["16_hops"]["accuracy"]) == 16
    assert main(["analyse", "lens", str(run / "systematic"), "--questions", "4"]) == 0
    assert "bridge" in capfd.readouterr().out
