"""Ouro's recipe against the paper's Tables 1-6, as the trainer will read it, step by step."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.mixture import parse_mixture
from titan_loop.data.prepare.packing import pack_source
from titan_loop.data.shards import index_path
from titan_loop.data.source_card import ShardCard, SourceCard, SplitCard
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.recipes.recipe import Stage
from titan_loop.recipes.registry import load_recipe
from titan_loop.training.resolved_run import resolve
from titan_loop.training.trainer import LoopTrainer
from train_configs.ouro import recipes as ouro

MI, T, B = 2**20, 10**12, 10**9
EOS = 0
VOCABULARY = {"fineweb-edu": 32_000}  # and 49,152 for every other source
DOCUMENT_TOKENS = 256
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
# stage: tokens, window, RoPE base, then (learning rate, batch tokens, R, β) at the first, the
# middle and the last token. The rates at the middle of a cosine are the mean of both ends.
TABLE: dict[str, tuple[Any, ...]] = {
    "1a": (3 * T, 4096, 1e4, (0.0, 4 * MI, 8, 0.1), (3e-4, 8 * MI, 8, 0.1), (3e-4, 8 * MI, 8, 0.1)),
    "1b": (3 * T, 4096, 1e4, *[(3e-4, 8 * MI, 4, 0.05)] * 3),
    "ct_annealing": (
        14 * T // 10,
        16_384,
        4e4,
        (3e-4, 8 * MI, 4, 0.05),
        (1.65e-4, 8 * MI, 4, 0.05),
        (3e-5, 8 * MI, 4, 0.05),
    ),
    "longct": (20 * B, 65_536, 1e6, *[(3e-5, 8 * MI, 4, 0.05)] * 3),
    "mid_training": (
        300 * B,
        32_768,
        1e6,
        (3e-5, 8 * MI, 4, 0.05),
        (2e-5, 8 * MI, 4, 0.05),
        (1e-5, 8 * MI, 4, 0.05),
    ),
    "sft": (
        2 * sum(SFT_WINDOWS.values()) // SFT_BATCH_WINDOWS * 4 * MI,
        SFT_WINDOW,
        1e6,
        (2e-5, 4 * MI, 4, 0.05),
        (1e-5, 4 * MI, 4, 0.05),
        (0.0, 4 * MI, 4, 0.05),
    ),
    # The gate's loss has no entropy term.
    "gate": (2 * B, 32_768, 1e6, *[(3e-4, 8 * MI, 4, 0.0)] * 3),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every source the recipes name, small but valid, with the vocabulary their docstring wants."""
    root = tmp_path_factory.mktemp("ouro")
    stages = [s for name in ("ouro_1_4b", "ouro_scaling_study") for s in load_recipe(name).stages]
    packed: dict[str, set[int]] = {}
    for stage in stages:
        for entry in parse_mixture(stage.config.dataloader.mixture):
            lengths = packed.setdefault(entry.path, set())
            if entry.packed:
                lengths.add(stage.config.training.seq_len)
    for path, lengths in packed.items():
        write_source(root / path, SFT_WINDOWS.get(Path(path).name, 5) * SFT_WINDOW)
        for seq_len in lengths:
            pack_source(root / path, seq_len=seq_len)
    return root


def write_source(folder: Path, tokens: int) -> None:
    """Write a prepared source of documents of 256 tokens, the same ones in both splits."""
    vocabulary = VOCABULARY.get(folder.name, 49_152)
    ids = np.full(tokens, 7, dtype="<u2")
    ends = np.arange(DOCUMENT_TOKENS, tokens + 1, DOCUMENT_TOKENS, dtype="<u8")
    ids[ends - 1] = EOS
    splits = {}
    for split in ("train", "held_out"):
        shard = folder / split / "00000.ds"
        shard.parent.mkdir(parents=True)
        ids.tofile(shard)
        ends.tofile(index_path(shard))
        card = ShardCard(
            file=shard.name,
            documents=len(ends),
            tokens=tokens,
            bytes=shard.stat().st_size,
            sha256=hashlib.sha256(shard.read_bytes()).hexdigest(),
        )
        splits[split] = SplitCard(
            documents=len(ends),
            tokens=tokens,
            text_bytes=0,
            max_token_id=vocabulary - 1,
            shards=(card,),
        )
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    SourceCard(
        name=folder.name,
        tokenizer_sha256=f"of {vocabulary} tokens",
        vocab_size=vocabulary,
        eos_id=EOS,
        token_bytes=2,
        splits=splits,
        licence="test",
        versions={},
        command="test",
    ).write(folder)


@pytest.fixture
def stages(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Stage]:
    monkeypatch.chdir(corpus)
    recipe = load_recipe("ouro_1_4b")
    for stage in recipe.stages:
        stage.config = resolve(stage.config, 128).config
    return {stage.name: stage for stage in recipe.stages}


def test_the_stages_are_the_paper_s_in_its_order(stages):
    assert {name: stage.parent for name, stage in stages.items()} == {
        "1a": None,
        "1b": "1a",
        "ct_annealing": "1b",
        "longct": "ct_annealing",
        "mid_training": "longct",
        "gate": "mid_training",
        "sft": "mid_training",
    }


@pytest.mark.parametrize("name", TABLE)
def test_what_the_trainer_reads_is_the_paper_s_table(stages, name):
    config = stages[name].config
    tokens, window, rope_base, *moments = TABLE[name]
    assert config.total_tokens == tokens
    assert config.training.seq_len == window
    assert config.model_spec.model.layers[0].attention.rope.theta == rope_base
    for at, expected in zip((0, tokens // 2, tokens - 1), moments, strict=True):
        plan = config.plan_step(step=1, tokens=at, seed=0)
        rate, batch_tokens, recurrent_steps, entropy_weight = expected
        assert plan.learning_rate == pytest.approx(rate, rel=1e-6, abs=1e-12)
        assert plan.windows * window == batch_tokens
        assert plan.recurrent_steps == recurrent_steps
        assert plan.schedules["entropy_weight"] == entropy_weight
        # What the trainer sets before every step is this very schedule.
        assert config.lr_scheduler.schedule(at) == plan.learning_rate


def shares(config: LoopTrainer.Config) -> dict[str, float]:
    """Return the shares in which the stage's own loader serves its windows, in ten-thousandths."""
    loader = config.open_data()
    assert isinstance(loader, WindowLoader)
    order = loader.order.stretches[0].order
    names = [Path(entry.path).name for entry in loader.mixture]
    return dict(zip(names, (order.shares / order.period).tolist(), strict=True))


def test_the_mixtures_are_the_paper_s(stages):
    assert shares(stages["1a"].config) == pytest.approx(STAGE_1, abs=2e-3)
    assert shares(stages["1b"].config) == shares(stages["1a"].config)
    assert shares(stages["ct_annealing"].config) == pytest.approx(STAGE_2, abs=2e-3)
    assert shares(stages["longct"].config) == {"prolong-64k": 1.0}
    mid_training = shares(stages["mid_training"].config)
    assert mid_training["mid-training-sft"] == pytest.approx(0.3)
    assert not {"map-cc", "ultra-fineweb-zh"} & mid_training.keys()
    assert math.fsum(mid_training[name] for name in STAGE_2) == pytest.approx(0.6, abs=5e-4)


def test_the_sft_reads_every_window_of_unequal_sources_twice(stages):
    config = stages["sft"].config
    loader = config.open_data()
    assert isinstance(loader, WindowLoader)
    assert isinstance(config.dataloader, WindowLoader.Config)
    assert {
        Path(entry.path).name: source.windows_per_epoch
        for entry, source in zip(loader.mixture, loader.sources, strict=True)
    } == SFT_WINDOWS
    windows = config.windows_of_the_run()
    # Shares are rounded to 1/10,000: over many windows only caps keep a source at two epochs.
    assert {source.max_epochs for source in loader.demand(windows)} == {2}
    assert config.dataloader.when_exhausted == "renormalise"
    left_over = 2 * sum(SFT_WINDOWS.values()) - windows
    assert 0 <= left_over < SFT_BATCH_WINDOWS
    source_epoch_number = loader.locate(np.arange(windows))
    read, times = np.unique(source_epoch_number[:, [0, 2]], axis=0, return_counts=True)
    assert len(read) == sum(SFT_WINDOWS.values())
    assert sorted(times) == [1] * left_over + [2] * (len(read) - left_over)


def test_the_larger_model_is_the_smaller_one_upcycled(corpus, monkeypatch):
    monkeypatch.chdir(corpus)
    recipe = load_recipe("ouro_2_6b")
    first, second, *rest = recipe.stages
    assert first.config.model.size == "1.4b"
    assert second.config.checkpoint.carry.upcycle == "stacked"
    assert all(stage.config.checkpoint.carry.upcycle == "no" for stage in [first, *rest])
    for stage in (first, second):
        stage.config = resolve(stage.config, 128).config
    layers = []
    for stage in (first, second):
        model = stage.config.model_spec.model
        assert isinstance(model, LoopDecoder.Config)
        layers.append(len(model.layers))
    assert layers == [24, 48]


@pytest.mark.parametrize(
    ("size", "millions"), [("53m", 53), ("134m", 134), ("374m", 374), ("778m", 778), ("1.4b", 1364)]
)
def test_the_scaling_study_has_the_paper_s_sizes(corpus, monkeypatch, size, millions):
    monkeypatch.chdir(corpus)
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


@pytest.mark.parametrize("study", ["ouro_scaling_study", "ouro_prior_ablation"])
def test_the_studies_resolve_with_the_tokenizer_that_their_docstring_names(
    corpus, monkeypatch, study
):
    told = " ".join((ouro.__doc__ or "").split())
    assert "one tokenizer of 49,152 tokens for all of them but `fineweb-edu`" in told
    assert "which wants one of 32,000 tokens" in told
    monkeypatch.chdir(corpus)
    for stage in load_recipe(study).stages:
        resolve(stage.config, 128)
