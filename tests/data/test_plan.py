"""`titan-loop data plan`: what a recipe needs against what there is."""

from pathlib import Path

import pytest

from tests.data.load.splits import load
from tests.support.tiny import tiny_config
from titan_loop.cli.main import main
from titan_loop.data.load.loader import WindowLoader
from titan_loop.recipes.recipe import Recipe, Stage


@pytest.fixture
def mixture(write_source, documents) -> str:
    a, b = (write_source(name, [documents(i, 400, 20)]) for i, name in enumerate("ab"))
    return f"{a}=0.75,{b}=0.25"


def plan(mixture: str, *flags: str) -> int:
    return main(["data", "plan", "quickstart", "--dataloader.mixture", mixture, *flags])


def test_a_plan_compares_needed_and_available(mixture, capsys):
    assert plan(mixture, "--total-tokens", "8192") == 0
    out = capsys.readouterr().out
    assert "quickstart: 8,192 tokens in 32 windows of 256" in out
    source, *_ = mixture.split("=")
    loader = load([source], seq_len=256)
    available = loader.sources[0].windows_per_epoch * 256
    lines = out.splitlines()
    named = [line for line in lines if "holds out no document: neither held_out nor" in line]
    assert [line.split()[1][-2:] for line in named] == ["/a", "/b"]
    name, needed, found, epochs, most, _ = lines[2].split()
    assert (name, needed, found, most) == ("a", "6,144", f"{available:,}", "-")
    assert float(epochs) == pytest.approx(6144 / available, abs=1e-3)
    size = sum(path.stat().st_size for path in (Path(source) / "train").iterdir())
    assert loader.demand(32)[0].disk_bytes == size
    assert main(["data", "plan", "depth_demo"]) == 0
    assert capsys.readouterr().out.count("nothing to compare with") == 2


def test_every_stage_is_planned_and_the_short_ones_are_named(
    mixture, tmp_path, monkeypatch, capsys
):
    source, *_ = mixture.split("=")
    stages = []
    for name, epochs in {"first": 1, "second": None, "third": 2}.items():
        config = tiny_config(Path(source), tmp_path / name, steps=100)
        assert isinstance(config.dataloader, WindowLoader.Config)
        config.dataloader.max_epochs = epochs
        stages.append(Stage(name=name, config=config))
    recipe = Recipe(name="three", stages=stages)
    monkeypatch.setattr("titan_loop.cli.stage_flags.load_recipe", lambda name: recipe)
    assert main(["data", "plan", "three"]) == 2
    printed = capsys.readouterr()
    for name in ("first", "second", "third"):
        assert f"{name}: 25,600 tokens in 800 windows of 32" in printed.out
    (line,) = printed.err.splitlines()
    assert "first: total_tokens needs 800 windows of 32, the mixture has" in line
    assert "max_epochs=1 times (when_exhausted=stop); raise max_epochs, add" in line
    assert "; third: total_tokens needs 800 windows" in line
    assert "second" not in line
