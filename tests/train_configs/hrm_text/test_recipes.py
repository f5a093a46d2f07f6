"""HRM-Text's recipes: published settings, arms of equal parameters and FLOPs, a little training."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.models.family import build_decoder
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.flop_budget import mean_flops, within_budget
from train_configs.hrm_text.recipes import ARMS, FLOPS, TASKS

VOCABULARIES = {"text": 1024, "two_hop": 90, "mano": 14}


def test_pretraining_is_as_published():
    config = load_recipe("hrm_text_1b").stage("pretraining").config
    step = 196_608
    growth = config.recurrence.backward_growth
    assert growth is not None
    fifth = config.total_tokens // 5
    shares = (0.0, 0.3, 0.34, 0.6, 0.67, 0.99, 1.0, 4.9)
    # 2 + int(3 · min(1, step / warm-up)) in the released code
    assert [growth(round(share * fifth)) for share in shares] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert [config.learning_rate(n * step) for n in (0, 1_000, 2_000, 300_000)] == pytest.approx(
        [0, 1.1e-4, 2.2e-4, 2.2e-4]
    )
    assert config.batch.global_batch_tokens(0) == step
    assert config.ema.decay == 0.9999
    assert config.dataloader.prefix


def test_the_arms_of_a_task_have_the_same_parameters_and_flops():
    stages = {stage.name: stage.config for stage in load_recipe("hrm_small").stages}
    for task in TASKS:
        counts, flops = {}, {}
        for arm, options in ARMS.items():
            if (task, arm) == ("text", "hrm"):
                continue
            config = stages[f"{arm}_{task}"]
            sized = replace(config.model, vocab_size=VOCABULARIES[task])
            model = build_decoder(sized, max_seq_len=64, device="meta")
            counts[arm] = sum(p.numel() for p in model.parameters())
            config = within_budget(replace(config, model=sized))
            cost = mean_flops(config, stage_architecture(config)).total
            if "hrm" in arm or options.get("same_flops"):
                flops[arm] = cost * config.total_tokens
        assert max(counts.values()) < 1.004 * min(counts.values())
        assert [*flops.values()] == pytest.approx([FLOPS[task]] * len(flops), rel=5e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_tasks_train_with_prefixes(tmp_path: Path):
    few = ["--training.steps", "4", "--suite.interval", "4"]
    assert main(["train", "hrm_short", "--dump-folder", str(tmp_path), *few]) == 0
