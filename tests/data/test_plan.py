"""`titan-loop data plan`: what a recipe needs against what there is."""

from pathlib import Path

import pytest

from tests.data.load.splits import load
from titan_loop.cli.main import main


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
