"""train_configs/README.md: its recipe trains, and its commands run one after the other."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import train_configs
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_OK
from titan_loop.recipes.registry import recipe_summaries

README = Path(train_configs.__path__[0]) / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_every_recipe_is_in_the_table():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert set(recipe_summaries()) <= named


@pytest.mark.usefixtures("alone")
def test_the_recipe_and_the_commands_run(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    (module,) = blocks("python")
    (tmp_path / "my_recipe.py").write_text(module)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "my").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_recipe", raising=False)
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in blocks("sh")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert len(commands) == 7
    for command in commands:
        assert main(command) == EXIT_OK, command
    out = capfd.readouterr().out
    assert "└─ annealing  complete, 4,096 tokens" in out
    assert "everything is trained" in out

    runs = tmp_path / "runs"
    last = read_manifest(runs / "other" / "annealing" / "checkpoints" / "step-4")
    assert last["trainer"]["recurrent_steps"] == 2
    assert not (runs / "other" / "pretraining" / "checkpoints" / "step-8").exists()
    forked = read_manifest(runs / "fork" / "annealing" / "checkpoints" / "step-4")["lineage"]
    assert forked["origin"]["path"].endswith("my_recipe/pretraining/checkpoints/step-4")
