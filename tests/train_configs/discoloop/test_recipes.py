"""DiscoLoop's recipes: the published settings, what arms share, a little training."""

import dataclasses
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.models.family import build_decoder
from titan_loop.recipes.registry import load_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

T_440M = 19_074 * 2**20


@pytest.mark.parametrize(
    ("name", "epochs", "examples", "steps"),
    [
        ("discoloop_symbolic", 3_000, 20_000, 2),
        ("discoloop_three_hop", 3_000, 20_000, 3),
        ("discoloop_language", 5_000, 20_000, 2),
    ],
)
def test_arms_share_all_but_the_model(name, epochs, examples, steps):
    recipe = load_recipe(name)
    layers = {}
    for stage in recipe.stages:
        config, arm = stage.config, stage.name.rpartition("_")[2]
        assert config.total_tokens == epochs * examples * config.training.seq_len
        assert config.recurrence.steps(0) == (1 if arm == "untied" else steps)
        layers[arm] = config.model.n_layers
        assert config.model.tie_weights
        if isinstance(config.model, DiscoLoopOptions):
            assert config.model.temperature == config.model.channel_strength == 1.0
            gate = "learned" if name == "discoloop_language" else "fixed"
            assert (config.model.channel_gate, config.model.top_k) == (gate, None)
    assert layers["plain"] == layers["discoloop"] == layers["untied"] / steps


def test_the_language_models_are_the_papers():
    stages = {stage.name: stage.config for stage in load_recipe("discoloop_440m").stages}
    assert stages["discoloop"].model.top_k == 128
    assert (stages["ponder"].model.top_k, stages["ponder"].model.scale_embeddings) == (None, True)
    assert stages["ponder"].model.start_factor == stages["ponder"].recurrence.steps(0) - 1 == 3
    for config in stages.values():
        options = dataclasses.replace(config.model, attention="sdpa")
        model = build_decoder(options, max_seq_len=8, device="meta")
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 441
        assert config.total_tokens == T_440M
        assert config.training.seq_len * 128 == config.batch.global_batch_tokens(0)
        rate = config.learning_rate
        ends = [rate(0), rate(500 * 2**20), rate(1_000 * 2**20), rate(T_440M)]
        assert ends == pytest.approx([0, 1.5e-3, 3e-3, 1e-5])
        assert (config.optimizer.name, config.adamw.eps) == ("muon", 1e-15)


@pytest.mark.usefixtures("alone")
def test_the_short_form_trains_and_examines_every_arm(tmp_path: Path, capfd):
    run = tmp_path / "run"
    half = ["--training.steps", "12"]  # to the first checkpoint and exam
    assert main(["train", "two_hop_short", "--dump-folder", str(run), *half]) == 0
    for arm, steps in (("plain", 2), ("discoloop", 2), ("untied", 1)):
        last = read_jsonl(RunDirectory(run / arm).evals_jsonl)[-1]
        assert f"two_graph/ood_2/acc,none/static:{steps}" in last["results"]
    capfd.readouterr()
    words = ["analyse", "intervention", str(run / "plain"), "--questions", "8"]
    assert main([*words, "--strengths", "0", "0.5"]) == 0
    assert "ood_2" in capfd.readouterr().out
