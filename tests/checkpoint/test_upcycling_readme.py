"""UPCYCLING.md: its commands run, one after the other, and its table is the flags'."""

import shlex
from pathlib import Path

import pytest

import titan_loop.checkpoint
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.cli.main import main
from titan_loop.cli.overrides import apply_overrides
from titan_loop.errors import EXIT_OK
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.runs.run_directory import RunDirectory
from train_configs.quickstart.recipes import quickstart

README = Path(titan_loop.checkpoint.__path__[0]) / "UPCYCLING.md"


@pytest.mark.usefixtures("alone")
def test_the_commands_run(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """On a tiny model of as many layers as the quick start's, in whose stead it trains."""
    upcycle, train, evaluate = (
        shlex.split(line)[1:]
        for line in README.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if line.startswith("    titan-loop ")
    )
    monkeypatch.chdir(tmp_path)
    parent = tiny_config(source, Path("runs/quickstart"), steps=2)
    parent.model = OuroOptions(size="debugmodel", n_layers=1)
    train_run(parent)
    assert main(upcycle) == EXIT_OK
    assert "--dump-folder runs/deeper --model.n-layers 2" in shlex.join(train)

    base = tiny_config(source, Path("runs/quickstart"), steps=2)
    base.model = OuroOptions(size="debugmodel")
    at = train.index("--total-tokens") + 1
    assert int(train[at]) == 2 * quickstart().total_tokens
    train[at] = str(2 * base.total_tokens)
    train_run(apply_overrides(base, train[2:], "titan-loop train quickstart"))
    assert main(evaluate) == EXIT_OK
    first, last = (read_manifest(RunDirectory("runs/deeper").checkpoint(step)) for step in (2, 4))
    assert last["trainer"]["tokens"] == 2 * first["trainer"]["tokens"]
    assert last["trainer"]["recurrent_steps"] == 2
    assert f'"layers": {first["lineage"]["upcycled"]["layers"]}' in README.read_text()
