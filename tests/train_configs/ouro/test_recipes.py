"""Ouro's recipe against the paper's Tables 1-6, as the trainer will read it, step by step."""

import math
from pathlib import Path
from typing import Any

import pytest

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.mixture import parse_mixture
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.recipes.recipe import Stage
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.trainer import LoopTrainer
from train_configs.ouro import recipes as ouro

MI, T, B = 2**20, 10**12, 10**9
SFT_WINDOW = 32_768
SFT_WINDOWS = {"sft-math": 55, "sft-code": 50, "sft-science": 13, "sft-chat": 12}
SFT_BATCH_WINDOWS = 4 * MI // SFT_WINDOW

STAGE_1 = {
    "nemotron-cc": 0.734,
    "map-cc": 0.13,
    "ultra-fineweb-zh": 0.02,
    "opencoder-pretrain": 0.075,
    "megamath-web": 0.041,
}
STAGE_2 = {
    "nemotron-cc-high-quality": 0.665,
    "nemotron-cc-math-v1": 0.15,
    "megamath-high-quality": 0.046,
    "opc-annealing-corpus": 0.005,
    "nemotron-synthetic-code": 0.038,
    "nemotron-sft-code": 0.034,
    "nemotron-sft-general": 0.062,
}


def at(*rates: float, batch: int = 8 * MI, steps: int = 4, beta: float = 0.05) -> list[Any]:
    return [(rate, batch, steps, beta) for rate in rates]


# stage: tokens, window, RoPE base, then (learning rate, batch tokens, R, β) at the first, the
# middle and the last token. The rates at the middle of a cosine are the mean of both ends.
SFT_TOKENS = 2 * sum(SFT_WINDOWS.values()) // SFT_BATCH_WINDOWS * 4 * MI
TABLE: dict[str, tuple[Any, ...]] = {
    "1a": (3 * T, 4096, 1e4, (0.0, 4 * MI, 8, 0.1), *at(3e-4, 3e-4, steps=8, beta=0.1)),
    "1b": (3 * T, 4096, 1e4, *at(3e-4, 3e-4, 3e-4)),
    "ct_annealing": (14 * T // 10, 16_384, 4e4, *at(3e-4, 1.65e-4, 3e-5)),
    "longct": (20 * B, 65_536, 1e6, *at(3e-5, 3e-5, 3e-5)),
    "mid_training": (300 * B, 32_768, 1e6, *at(3e-5, 2e-5, 1e-5)),
    "sft": (SFT_TOKENS, SFT_WINDOW, 1e6, *at(2e-5, 1e-5, 0.0, batch=4 * MI)),
    # The gate's loss has no entropy term.
    "gate": (2 * B, 32_768, 1e6, *at(3e-4, 3e-4, 3e-4, beta=0.0)),
}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stage]:
    """Return the stages by name, with the packed windows of the SFT's sources as above."""
    monkeypatch.setattr(ouro, "_packed_windows", lambda source, _: SFT_WINDOWS[source.name])
    return {stage.name: stage for stage in load_recipe("ouro_1_4b").stages}


def test_the_stages_are_the_paper_s_in_its_order(stages):
    assert {name: stage.parent for name, stage in stages.items()} == {
        "1a": None, "1b": "1a", "ct_annealing": "1b", "longct": "ct_annealing",
        "mid_training": "longct", "gate": "mid_training", "sft": "mid_training",
    }  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_the_trainer_reads_is_the_paper_s_table(stages, name):
    config = stages[name].config
    tokens, window, rope_base, *moments = TABLE[name]
    assert config.total_tokens == tokens
    assert config.training.seq_len == window
    model = decoder_config(config.model, max_seq_len=window)
    assert model.layers[0].attention.rope.theta == rope_base
    for at, expected in zip((0, tokens // 2, tokens - 1), moments, strict=True):
        plan = config.plan_step(step=1, tokens=at, seed=0)
        rate, batch_tokens, recurrent_steps, entropy_weight = expected
        assert plan.learning_rate == pytest.approx(rate, rel=1e-6, abs=1e-12)
        assert plan.windows * window == batch_tokens
        assert plan.recurrent_steps == recurrent_steps
        assert plan.schedules["entropy_weight"] == entropy_weight


def shares(config: LoopTrainer.Config) -> dict[str, float]:
    """Return each source's share of a stage's windows."""
    assert isinstance(config.dataloader, WindowLoader.Config)
    weights = {
        Path(entry.path).name: entry.weight for entry in parse_mixture(config.dataloader.mixture)
    }
    return {name: weight / math.fsum(weights.values()) for name, weight in weights.items()}


def test_the_mixtures_are_the_paper_s(stages):
    assert shares(stages["1a"].config) == pytest.approx(STAGE_1, abs=2e-3)
    assert shares(stages["1b"].config) == shares(stages["1a"].config)
    assert shares(stages["ct_annealing"].config) == pytest.approx(STAGE_2, abs=2e-3)
    assert shares(stages["longct"].config) == {"prolong-64k": 1.0}
    mid_training = shares(stages["mid_training"].config)
    assert mid_training["mid-training-sft"] == pytest.approx(0.3)
    assert not {"map-cc", "ultra-fineweb-zh"} & mid_training.keys()
    assert math.fsum(mid_training[name] for name in STAGE_2) == pytest.approx(0.6, abs=5e-4)


def test_the_sft_reads_unequal_sources_twice(stages):
    config = stages["sft"].config
    windows = sum(SFT_WINDOWS.values())
    want = {name: count / windows for name, count in SFT_WINDOWS.items()}
    assert shares(config) == pytest.approx(want)
    # Shares are rounded to 1/10,000: over many windows only caps keep a source at two epochs.
    assert (config.dataloader.max_epochs, config.dataloader.when_exhausted) == (2, "renormalise")


def test_the_larger_model_is_the_smaller_one_upcycled():
    first, second, *rest = load_recipe("ouro_2_6b").stages
    assert first.config.model.size == "1.4b"
    assert second.config.checkpoint.carry.upcycle == "stacked"
    assert all(stage.config.checkpoint.carry.upcycle == "no" for stage in [first, *rest])
    models = [decoder_config(stage.config.model, max_seq_len=8) for stage in (first, second)]
    assert [len(model.layers) for model in models] == [24, 48]


@pytest.mark.parametrize(
    ("size", "millions"), [("53m", 53), ("134m", 134), ("374m", 374), ("778m", 778), ("1.4b", 1364)]
)
def test_the_scaling_study_has_the_paper_s_sizes(size, millions):
    recipe = load_recipe("ouro_scaling_study")
    assert len(recipe.stages) == 5 * (4 + 3)
    for steps in (1, 2, 4, 8):
        config = recipe.stage(f"{size}-r{steps}").config
        assert config.total_tokens == 20 * B
        assert config.recurrence.steps(0) == steps
        assert config.model.exit_gate == (steps > 1)
        model = build_decoder(config.model, max_seq_len=4096, device="meta")
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    layers = len(model.layers)
    for steps in (2, 4, 8):  # not looped: as many layers as the loop visits
        config = recipe.stage(f"{size}-standard{steps}").config
        assert (config.recurrence.steps(0), config.model.exit_gate) == (1, False)
        assert config.model.n_layers == steps * layers
        assert config.learning_rate == recipe.stage(f"{size}-r{steps}").config.learning_rate
