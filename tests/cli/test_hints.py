"""Commands that the program advises: they exist with their flags, and some run as printed."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest

import titan_loop
from tests.support.tiny import tiny_config
from titan_loop.cli.main import VERBS, main
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.runner import run_recipe
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import read_status, status_lines

PACKAGE = Path(titan_loop.__file__).parent
# `titan-loop WORDS`, up to a quote or a mark of punctuation.
ADVICE = re.compile(r"titan-loop ([a-z]\w+(?![\w:])(?:[\w./={}…-]| (?! ))*)")
PLUGGED = ("retrofit", "moe")
"""Verbs that families register."""


def advised() -> Iterator[tuple[str, str]]:
    """Yield (place, words after `titan-loop`) of every string in the package but docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = [*ast.walk(tree)]
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        inner = {
            id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in nodes:
            if id(node) in docs | inner:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(
                    part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
                )
            else:
                continue
            for found in ADVICE.finditer(text):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", found[1].strip()


def test_every_command_that_is_advised_exists_with_its_flags(capfd: pytest.CaptureFixture[str]):
    helps: dict[tuple[str, ...], str] = {}
    seen = 0
    for place, words in advised():
        verb, *rest = words.split()
        assert verb in (*VERBS, *PLUGGED), (place, words)
        group = rest[:1] if verb in ("data", "convert", "checkpoint", "slurm", "results") else []
        group = [word for word in group if re.fullmatch("[a-z-]+", word)]
        recipe = ["quickstart"] if verb == "train" or [verb, *group] == ["slurm", "submit"] else []
        key = (verb, *group, *recipe)
        flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
        if flags and key not in helps:
            main([verb, *group, *recipe, "--help"])
            helps[key] = capfd.readouterr().out
            if recipe:
                main([verb, *group, "--help"])
                helps[key] += capfd.readouterr().out
        seen += 1
        for flag in flags:
            assert re.search(rf"{flag}\b", helps[key]), (place, words, flag)
    assert seen > 40


def train(config, folder: Path) -> None:
    config.checkpoint.interval = 2
    run_recipe(Recipe.of_one_run("tiny", config), folder=str(folder))


def words_after(line: str) -> list[str]:
    return shlex.split(line.partition("titan-loop ")[2])


def test_what_upcycle_and_status_advise_trains(
    alone: None, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run, wide = tmp_path / "run", tmp_path / "wide"
    train(tiny_config(source, run, steps=2), run)
    assert main(["upcycle", str(run), "--output", str(wide), "--layers", "4"]) == 0
    advice = capfd.readouterr().out.splitlines()[-1]
    tokens = SavedRun(wide).checkpoint().tokens
    assert main(words_after(advice)) == 0
    assert SavedRun(wide).checkpoint().tokens == 2 * tokens
    assert SavedRun(wide).config["model"]["n_layers"] == 4

    assert main(["train", str(run), "--total-tokens", str(2 * tokens)]) == 0
    assert SavedRun(run).checkpoint().tokens == 2 * tokens
    rmtree(SavedRun(run).checkpoint().path)  # as if it had been interrupted
    *_, following = status_lines(read_status(tmp_path))
    assert following == f"next: titan-loop train {run}"
    assert main(words_after(following)) == 0
    assert SavedRun(run).checkpoint().tokens == 2 * tokens
    assert status_lines(read_status(tmp_path))[-1] == "everything is trained"
