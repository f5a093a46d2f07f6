"""Every command that README.md gives for `train` is one that `train` accepts."""

import itertools
import shlex
from pathlib import Path

import pytest

from titan_loop.cli.overrides import apply_overrides, take_flag
from titan_loop.cli.stage_flags import split_by_stage
from titan_loop.recipes.registry import load_recipe

README = Path(__file__).parents[2] / "README.md"


def train_commands() -> list[list[str]]:
    """Return the arguments after `train` of every indented command line."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    commands: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("    "):
            continue  # prose, which mentions commands in part
        words = shlex.split(line, comments=True) if " train " in line else []
        for program, verb in itertools.pairwise(words):
            if program in ("titan-loop", "titan_loop") and verb == "train":
                commands.append(words[words.index("train") + 1 :])
    return commands


def test_all_commands_are_found():
    assert len(train_commands()) >= 3


@pytest.mark.parametrize("command", train_commands(), ids=" ".join)
def test_the_command_is_accepted(command: list[str], capsys: pytest.CaptureFixture[str]):
    name, *flags = command
    recipe = load_recipe(name)
    flags, only = take_flag(flags, "--stage")
    flags, folder = take_flag(flags, "--dump-folder")
    assert flags or only or folder or len(recipe.stages) > 1
    flags, own = split_by_stage(flags, [stage.name for stage in recipe.stages])
    for stage in recipe.stages if only is None else [recipe.stage(only)]:
        given = [*flags, *own.get(stage.name, [])]
        if "--help" in given:
            with pytest.raises(SystemExit) as stop:
                apply_overrides(stage.config, given, "titan-loop train")
            assert stop.value.code == 0
            assert "--total-tokens" in capsys.readouterr().out
        elif given:
            assert apply_overrides(stage.config, given, "titan-loop train") != stage.config
