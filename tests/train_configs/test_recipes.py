"""Recipes as published, arms of a comparison at equal cost, and a few steps of each small study."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.models.family import build_decoder
from titan_loop.recipes.registry import load_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.flop_budget import mean_flops, within_budget
from titan_loop.training.trainer import LoopTrainer
from train_configs.depth_pays.recipes import TOTAL_FLOPS
from train_configs.hrm_text.recipes import FLOPS

TEXT_TOKENS = 1024
"""Vocabulary of the quick start's corpus."""


@cache
def stages(recipe: str) -> dict[str, LoopTrainer.Config]:
    """Return stage → config, whose vocabulary is known and whose tokens fit its FLOPs."""
    configs = {}
    for stage in load_recipe(recipe).stages:
        config, task = stage.config, stage.config.dataloader.generated_task()
        known = config.model.vocab_size or (TEXT_TOKENS if task is None else task.vocab_size)
        model = replace(config.model, attention="sdpa", vocab_size=known)
        configs[stage.name] = within_budget(replace(config, model=model))
    return configs


def parameters(recipe: str, stage: str) -> int:
    model = build_decoder(stages(recipe)[stage].model, max_seq_len=8, device="meta")
    return sum(p.numel() for p in model.parameters())


def flops(recipe: str, stage: str) -> float:
    config = stages(recipe)[stage]
    return mean_flops(config, stage_architecture(config)).total * config.total_tokens


@pytest.mark.parametrize(
    ("recipe", "stage", "windows", "window", "steps", "rate", "recurrent_steps"),
    [
        ("adaptive_200m", "loop5", 176, 2_048, 38_620, 3e-3, 1),
        ("discoloop_440m", "discoloop", 128, 8_192, 19_074, 3e-3, 4),
        ("discoloop_symbolic", "discoloop", 512, 3, 3_000 * 20_000 / 512, 1e-4, 2),
        ("discoloop_three_hop", "untied", 512, 4, 3_000 * 20_000 / 512, 1e-4, 1),
        ("hrm_text_1b", "pretraining", 48, 4_096, 305_512, 2.2e-4, 2),
        ("latent", "discrete", 32, 232, 156_250, 1e-3, 7),
        ("ouro_capo", "4-4-l4_100", 192, 512, 38_656, 1e-3, 4),
        ("ouro_mano", "2x6_l24", 128, 1_024, 200_000, 2e-4, 6),
        ("ouro_multi_hop", "6x4_120", 2_048, 1_024, 20_000, 5e-4, 4),
        ("recurrent_depth_systematic", "r4", 512, 3, 2_000 * 313_600 / 512, 1e-4, 4),
        ("recurrent_depth_extrapolation", "r8", 128, 41, 3_000_000, 1e-4, 8),
        ("retrofit_llama_1b", "retrofit_llama_1b", 1_024, 1_024, 49_591, 5e-5, 32),
        ("xllm_s", "s_parcae", 512, 8_192, 5_120, 1.5e-3, 5),
        ("xllm_730m", "dense_huginn", 512, 8_192, 119_210, 6e-4, 8),
        ("xllm_moe_ouro", "xllm_moe_ouro", 512, 8_192, 119_210, 6e-4, 4),
    ],
)
def test_batch_length_rate_and_depth_are_the_papers(
    recipe, stage, windows, window, steps, rate, recurrent_steps
):
    config = stages(recipe)[stage]
    batch = config.batch.global_batch_tokens(0)
    assert (batch / window, config.training.seq_len) == (windows, window)
    assert config.total_tokens / batch == pytest.approx(steps, rel=1e-3)
    assert config.learning_rate.largest == rate
    assert config.recurrence.steps.largest == recurrent_steps


@pytest.mark.parametrize(
    ("recipe", "stage", "millions"),
    [
        ("adaptive_200m", "iso_flop", 332),
        ("adaptive_200m", "iso_flop_memory", 481),
        *(("discoloop_440m", stage, 441) for stage in ("plain", "ponder", "discoloop")),
    ],
)
def test_models_have_the_papers_sizes(recipe, stage, millions):
    assert round(parameters(recipe, stage) / 1e6) == millions


MOE = ("dense", "looped_dense", "moe", "looped_moe", "looped_moe_attentions", "moe_k4")
TUNED = ("looped", "four_layers", "same_text", "more_text", "two_layers_more")


@pytest.mark.parametrize(
    ("recipe", "arms", "total"),
    [
        ("adaptive_200m", ("iso_flop", "loop3"), None),
        ("depth_pays", ("last_step", "grown_flops", "not_looped_muon_flops"), TOTAL_FLOPS),
        ("depth_pays_tuned", tuple(f"{arm}_1e-2" for arm in TUNED), TOTAL_FLOPS),
        ("looped_moe_small", MOE, None),
        ("quickstart_arithmetic", ("looped", "not_looped"), None),
        *(
            ("hrm_small", tuple(f"{arm}_{task}" for arm in arms), FLOPS[task])
            for task, arms in (
                ("text", ("hrm_causal", "plain_flops", "loop_flops")),
                ("mano", ("hrm", "hrm_causal", "plain_flops", "loop_flops")),
                ("two_hop", ("hrm", "hrm_causal", "plain_flops", "loop_flops")),
            )
        ),
    ],
)
def test_arms_cost_the_same_flops(recipe, arms, total):
    found = [flops(recipe, arm) for arm in arms]
    assert found == pytest.approx(
        [total or found[0]] * len(arms), rel=0.02 if total is None else 5e-3
    )


@pytest.mark.parametrize(
    ("recipe", "arms"),
    [
        ("adaptive_200m", ("iso_parameter_memory", "memory_open")),
        ("adaptive_small", ("iso_parameter", "loop3_memory")),
        ("depth_pays", ("not_looped", "last_step", "grown", "late_8_muon", "drawn_muon")),
        ("hrm_small", ("hrm_mano", "plain_mano", "loop_flops_mano")),
        ("looped_moe_small", ("moe", "looped_moe", "dense_parameters", "looped_dense_parameters")),
    ],
)
def test_arms_have_as_many_parameters(recipe, arms):
    found = [parameters(recipe, arm) for arm in arms]
    assert found == pytest.approx([found[0]] * len(arms), rel=1e-2)


def test_the_backward_pass_grows_as_in_the_released_code():
    """2 + int(3 · min(1, step / warm-up)), whose warm-up is a fifth of the tokens."""
    config = stages("hrm_text_1b")["pretraining"]
    growth, fifth = config.recurrence.backward_growth, config.total_tokens // 5
    shares = (0.0, 0.3, 0.34, 0.6, 0.67, 0.99, 1.0, 4.9)
    assert [growth(round(share * fifth)) for share in shares] == [2, 2, 3, 3, 4, 4, 5, 5]


def test_stage_two_of_a_readable_layer_starts_from_it_and_trains_the_gate_alone():
    recipe = load_recipe("depth_read")
    for stage in (stage for stage in recipe.stages if stage.parent):
        before = recipe.stage(stage.parent).config
        assert stage.config.trainable == "exit_gate"
        assert stage.config.model == before.model
        assert stage.config.dataloader.seed != before.dataloader.seed


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("recipe", "stage", "result"),
    [
        ("adaptive_small", "loop3_memory", "mano_capo/knowledge/bits/static:1"),
        ("hrm_small", "hrm_two_hop", "two_graph/ood_2/acc,none/static:2"),
        ("latent_small", "discrete_first", "dag_arithmetic/8_nodes/acc,none/static:8"),
        ("physics_exams", "hops_r2_50", "layered_paths/held_out_3_hops/acc,none/static:2"),
        ("recurrent_depth_small", "depth_dynamic", "permutation_hops/16_hops/acc,none/static:12"),
        ("two_hop_small", "discoloop", "two_graph/ood_2/acc,none/static:2"),
    ],
)
def test_a_stage_trains_and_is_examined(tmp_path: Path, recipe, stage, result):
    run = tmp_path / "run"
    words = ["train", recipe, "--stage", stage, "--dump-folder", str(run), "--training.steps", "2"]
    words += ["--suite.interval", "2", "--suite.questions", "4"]
    assert main(words) == 0
    assert result in read_jsonl(RunDirectory(run / stage).evals_jsonl)[-1]["results"]
