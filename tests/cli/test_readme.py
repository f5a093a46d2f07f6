"""Every command of a README is accepted: `train` with its flags, the others by their parser."""

import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest

from titan_loop.cli import main, train
from titan_loop.cli.arguments import bind
from titan_loop.cli.overrides import apply_overrides
from titan_loop.cli.stage_flags import split_by_stage
from titan_loop.plugins import names
from titan_loop.recipes.registry import load_recipe

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# `train` is above, `lm_eval` is the harness' command line; `data plan` needs data: tests/data.
CHECKED_ELSEWHERE = ("train", "lm_eval")


def train_commands() -> list[list[str]]:
    """Return the arguments after `train` of every indented command line."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    commands: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("    "):
            continue  # prose, which mentions commands in part
        words = shlex.split(line, comments=True) if " train " in line else []
        for program, verb in itertools.pairwise(words):
            of_a_run = words[-1].startswith("runs/")  # tests/cli/test_hints.py trains one
            if program in ("titan-loop", "titan_loop") and verb == "train" and not of_a_run:
                commands.append(words[words.index("train") + 1 :])
    return commands


def test_all_commands_are_found():
    assert len(train_commands()) >= 3


@pytest.mark.parametrize("command", train_commands(), ids=" ".join)
def test_the_command_is_accepted(command: list[str], capsys: pytest.CaptureFixture[str]):
    given = bind("train", inspect.unwrap(train.run), command).keywords
    flags, only, folder = given["flags"], given["stage"], given["dump_folder"]
    recipe = load_recipe(command[0])
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


def test_the_file_map_names_every_module_and_folder():
    named = re.findall(r"^    (\S+) +\S", README.read_text(encoding="utf-8"), re.MULTILINE)
    there: list[str] = []
    for path in (ROOT / "titan_loop").iterdir():
        if (path / "__init__.py").exists():
            there.append(f"titan_loop/{path.name}/")
        elif path.suffix == ".py" and not path.name.startswith("__"):
            there.append(f"titan_loop/{path.name}")
    assert [path for path in there if path not in named] == []


@pytest.mark.parametrize("readme", [README, ROOT / "titan_loop" / "README.md"], ids=str)
def test_files_that_a_readme_names_exist(readme: Path):
    text = readme.read_text(encoding="utf-8")
    paths = re.findall(r"(?:^    |`)([\w./]+(?:\.py|\.md|\.sh|/))(?=`| )", text, re.MULTILINE)
    written_by_a_run = r"(runs|tb|checkpoints|compile_cache|comm_traces)/.*"
    named = [path for path in paths if not re.fullmatch(written_by_a_run, path)]
    assert len(named) > 10
    assert [
        path for path in named if not any((at / path).exists() for at in (ROOT, readme.parent))
    ] == []


def other_commands() -> list[list[str]]:
    """Return what follows `titan-loop` on every line of a README that is such a command."""
    commands = []
    for readme in [README, *sorted(ROOT.glob("*/**/README.md"))]:
        if any(part.startswith(".") for part in readme.relative_to(ROOT).parts):
            continue  # an environment
        for line in readme.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            words = line.split()
            if words[:1] != ["titan-loop"] or "…" in line:
                continue
            command = shlex.split(_braces_expanded(line), comments=True)[1:]
            if command[0] not in CHECKED_ELSEWHERE and " ".join(command[:2]) != "data plan":
                commands.append(command)
    return commands


def _braces_expanded(line: str) -> str:
    """Write `a{b,c}` as a shell reads it, `ab ac`."""
    pattern = r"(\S*)\{([^,{}]+),([^,{}]+)\}"
    return re.sub(pattern, r"\1\2 \1\3", line)


def test_other_commands_are_found():
    verbs = {*main.VERBS, *names("verbs")}
    assert {command[0] for command in other_commands()} == verbs - {*CHECKED_ELSEWHERE}


class AcceptedError(Exception):
    """The command line was accepted."""


@pytest.mark.parametrize("command", other_commands(), ids=" ".join)
def test_the_parser_accepts_it(command: list[str], monkeypatch: pytest.MonkeyPatch):
    def accept(*arguments: object) -> None:
        bind(*arguments)
        raise AcceptedError

    monkeypatch.setattr("titan_loop.cli.arguments.bind", accept)
    with pytest.raises(AcceptedError):
        main._dispatch(command)
