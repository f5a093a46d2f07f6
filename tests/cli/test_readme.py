"""Commands of Markdown files and of `--help` are accepted; files that READMEs name exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_lines import accept, commands_of, examples_of
from titan_loop.cli import main
from titan_loop.errors import UserError
from titan_loop.plugins import names

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
HISTORY = [ROOT / "CHANGELOG.md", *ROOT.glob("train_configs/*/README.md")]  # as it was then


def commands() -> Iterator[tuple[str, list[str], bool]]:
    """Yield (place, words, whether in prose) of each command of Markdown files and help texts."""
    seen: list[object] = []
    texts: list[tuple[Path, str]] = []
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    found = [path for folder in folders for path in folder.rglob("*.md")]
    for path in sorted([*ROOT.glob("*.md"), *found]):
        if path not in HISTORY:
            texts.append((path, path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "titan_loop").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "For example:\n" in source else ():
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node, clean=False)):
                texts.append((path, examples_of(doc)))
    for path, text in texts:
        for words, in_prose in commands_of(text):
            if (words, in_prose) not in seen:
                seen.append((words, in_prose))
                yield str(path.relative_to(ROOT)), words, in_prose


COMMANDS = list(commands())


@pytest.mark.parametrize(
    ("words", "in_prose"),
    [pytest.param(words, part, id=f"{at}: {' '.join(words)}") for at, words, part in COMMANDS],
)
def test_the_program_accepts_it(words: list[str], in_prose: bool):
    accept(words, in_part=in_prose)


def test_every_verb_is_shown():
    verbs = {*main.VERBS, *names("verbs")}
    assert verbs <= {words[0] for place, words, in_prose in COMMANDS if not in_prose}
    assert sum(place.endswith(".py") for place, _, _ in COMMANDS) > 5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("train quickstart --nonesuch 1", "nonesuch"),
        ("train depth_demo --stage nonesuch", "nonesuch"),
        ("convert export runs/my --nonesuch", "nonesuch"),
        ("eval", "Missing"),
        ("slurm submit quickstart --nodes 1 --gpus-per-node 1 --time 1 --debug.sed 1", "debug.sed"),
    ],
)
def test_a_wrong_one_is_not_accepted(words: str, problem: str):
    with pytest.raises(UserError, match=problem):
        accept(words.split())


def test_the_file_map_names_every_package():
    named = re.findall(r"^    (\S+) +\S", README.read_text(encoding="utf-8"), re.MULTILINE)
    there = {f"titan_loop/{file.parent.name}/" for file in ROOT.glob("titan_loop/*/__init__.py")}
    assert len(there) > 15
    assert sorted(there - {*named}) == []


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
