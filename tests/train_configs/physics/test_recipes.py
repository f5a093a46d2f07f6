"""Ouro's section 6: the published settings, what compared stages share, a little training."""

from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.recipes.registry import load_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.trainer import LoopTrainer
from train_configs.physics.capo import Capo
from train_configs.physics.commuted_mano import CommutedMano
from train_configs.physics.layered_qa import LayeredQA


def configs(name: str) -> dict[str, LoopTrainer.Config]:
    return {stage.name: stage.config for stage in load_recipe(name).stages}


def test_mano_is_trained_as_published():
    found = configs("ouro_mano")
    assert len(found) == 21
    for length, steps in ((10, 80_000), (16, 110_000), (24, 200_000)):
        config = found[f"2x6_l{length}"]
        assert config.dataloader.generated_task() == CommutedMano(23, length)
        assert config.total_tokens == steps * 128 * 1024
        assert (config.model.n_layers, config.recurrence.steps(0)) == (2, 6)
        rate = config.learning_rate
        ends = [rate(0), rate(1_000 * 128 * 1024), rate(config.total_tokens)]
        assert ends == pytest.approx([0, 2e-4, 2e-5])
        assert (config.adamw.weight_decay, config.adamw.beta2) == (0.1, 0.98)
    visits = {
        (c.model.n_layers or 0) * c.recurrence.steps(0)
        for name, c in found.items()
        if "x1_" not in name
    }
    assert visits == {12}


def test_questions_and_biographies_are_trained_as_published():
    questions = configs("ouro_multi_hop")
    assert len(questions) == 40
    config = questions["6x4_120"]
    assert config.dataloader.generated_task() == LayeredQA(trained_questions=120_000)
    assert config.total_tokens == 20_000 * 2_048 * 1_024
    assert config.learning_rate(1_000 * 2_048 * 1_024) == pytest.approx(5e-4)
    biographies = configs("ouro_capo")
    assert len(biographies) == 40
    config = biographies["4-4-l4_100"]
    task = config.dataloader.generated_task()
    assert task == Capo(people=100_000)
    sample = Capo(people=300)
    tokens = [len(sample.encode(q).tokens) for q in sample.held_out_questions(300, "names")]
    exposures = config.total_tokens * len(tokens) / sum(tokens) / 100_000
    assert 1_000 <= exposures < 1_020
    assert config.batch.global_batch_tokens(0) == 192 * 512
    assert (config.adamw.weight_decay, config.learning_rate(192 * 512_000)) == (0.02, 1e-3)
    assert config.model.tie_weights


@pytest.mark.usefixtures("alone")
def test_the_short_form_trains_and_examines_every_task(tmp_path: Path):
    run = tmp_path / "run"
    assert main(["train", "physics_short", "--dump-folder", str(run)]) == 0
    for stage, result in (
        ("mano_1x4", "mano/acc,none/static:4"),
        ("capo_l4", "capo/knowledge/bits_per_parameter/static:4"),
        ("hops_r2_25", "layered_qa/held_out_3_hops/acc,none/static:2"),
    ):
        assert result in read_jsonl(RunDirectory(run / stage).evals_jsonl)[-1]["results"]
