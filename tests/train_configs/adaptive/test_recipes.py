"""Adaptive loops and memory: the published settings, what arms share, a little training."""

import dataclasses
import json
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.registry import load_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl


def parameters(recipe: Recipe) -> dict[str, int]:
    counts = {}
    for stage in recipe.stages:
        vocabulary = stage.config.model.vocab_size or stage.config.dataloader.vocabulary().size
        options = dataclasses.replace(stage.config.model, attention="sdpa", vocab_size=vocabulary)
        model = build_decoder(options, max_seq_len=8, device="meta")
        counts[stage.name] = sum(p.numel() for p in model.parameters())
    return counts


def test_the_language_models_are_the_papers():
    recipe = load_recipe("adaptive_200m")
    counts = parameters(recipe)
    assert round(counts["iso_flop"] / 1e6) == 332
    assert round(counts["iso_flop_memory"] / 1e6) in (480, 481)
    assert counts["iso_parameter_memory"] == pytest.approx(counts["memory_open"], rel=1e-3)
    flops = {}
    for stage in recipe.stages:
        config, batch = stage.config, stage.config.batch.global_batch_tokens(0)
        assert config.total_tokens == 38_620 * batch == pytest.approx(13.9e9, rel=3e-3)
        assert max(config.learning_rate(n * batch) for n in range(0, 38_620, 20)) == 3e-3
        assert config.recurrence.steps(0) == 1
        assert config.loss.ponder_weight == 0
        options = dataclasses.replace(config.model, attention="sdpa")
        flops[stage.name] = decoder_config(options, max_seq_len=8).training_flops(2048, 1).total
    assert flops["iso_flop"] == flops["loop3"]


def test_small_arms_match_parameters_or_flops():
    recipe = load_recipe("adaptive_small")
    counts = parameters(recipe)
    assert counts["iso_parameter"] == pytest.approx(counts["loop3_memory"], rel=2e-3)
    assert counts["loop3"] == counts["loop3_decay"]
    configs = {stage.name: stage.config for stage in recipe.stages}
    assert configs["loop3_decay"].model.decay_controls
    for config in configs.values():
        assert config.dataloader == configs["plain"].dataloader
        assert config.total_tokens == configs["plain"].total_tokens


@pytest.mark.usefixtures("alone")
def test_the_short_form_trains_examines_and_analyses(tmp_path: Path, capfd):
    run = tmp_path / "run"
    words = ["train", "adaptive_short", "--dump-folder", str(run), "--stage", "loop3_memory"]
    assert main([*words, "--loss.ponder-weight", "0.1", "--model.n-layers", "2"]) == 0
    run = run / "loop3_memory"
    (evaluation,) = read_jsonl(RunDirectory(run).evals_jsonl)
    assert "mano_capo/knowledge/bits/static:1" in evaluation["results"]
    last = RunDirectory(run).read_metrics()[-1]
    assert 0 < last["loops/cost"] < 1
    assert 1 < last["loops/layer_2"] < 3
    assert {"loop_scale/layer_1_3", "memory_gate/local_1", "memory_gate/global_2"} <= last.keys()
    assert main(["report", str(run)]) == 0
    assert (run / "plots" / "layers.png").exists()
    capfd.readouterr()
    assert main(["analyse", "survival", str(run), "--questions", "8"]) == 0
    assert "survival:0.5" in capfd.readouterr().out
    record = json.loads((run / "evals" / "survival-step-12.json").read_text())
    mixture, *others = record["strata"]["mano_capo/mano"]
    assert mixture["threshold"] is None
    assert all(error["divergence_nats"] > 0 for error in others)
    asked = ["eval", str(run), "--tasks", "mano_capo", "--limit", "8"]
    assert main([*asked, "--exit", "survival:0.5"]) == 0
    capfd.readouterr()
    for words, message in (
        (["convert", "export", str(run), "--output", f"{run}-hf"], "does not support export"),
        ([*asked, "--exit", "q:0.5"], "model.family=adaptive does not"),
        ([*asked, "--depths", "2"], "loops inside its layers"),
        (["analyse", "lens", str(run)], "does not support analyse"),
        (["analyse", "survival", str(run), "--thresholds", "0"], "survival:0.0 must be above 0"),
    ):
        code = main(words)
        told = capfd.readouterr()
        assert message in told.err + told.out, words
        assert code == 2 or words[0] == "eval"
