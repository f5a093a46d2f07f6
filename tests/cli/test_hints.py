"""Commands that the program advises: each is accepted, and some are run as they were printed."""

import ast
import gc
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import titan_loop.compat as compat

import titan_loop
from tests.support.command_lines import PLACEHOLDERS, accept
from tests.support.tiny import tiny_config
from titan_loop.cli.main import main
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import read_status, status_lines

PACKAGE = Path(titan_loop.__file__).parent
# A verb, perhaps a second word, then values and flags up to prose, which is in lower case.
ADVICE = re.compile(r"titan-loop ([a-z]\w+(?: [a-z]\w+)?(?: (?=[-A-Z\d{])[\w./={}:-]+)*)")
RECIPE = "tests.cli.test_hints:two_stages"


def hints() -> Iterator[tuple[str, str]]:
    """Yield (place, words after `titan-loop`) of every string of the package but docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "titan-loop " not in (source := path.read_text()):
            continue
        nodes = [*ast.walk(ast.parse(source))]
        formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        skipped |= {id(part) for node in formatted for part in node.values}
        for node in nodes:
            if id(node) in skipped or not isinstance(node, (ast.Constant, ast.JoinedStr)):
                continue
            text = ""
            for part in node.values if isinstance(node, ast.JoinedStr) else [node]:
                text += str(part.value) if isinstance(part, ast.Constant) else "{}"
            for found in ADVICE.finditer(text):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", found[1]


HINTS = [*hints()]


@pytest.mark.parametrize("hint", [pytest.param(hint, id=" ".join(pair)) for *pair, hint in HINTS])
def test_a_hint_is_a_command(hint: str):
    words = [PLACEHOLDERS.get(word, word) for word in hint.split()]
    for place, before in enumerate(words[:-1], 1):
        value = "1" if before.startswith("--") else "runs/my"
        words[place] = words[place].replace("{}", value)
    accept(words, in_part=True)


def test_hints_are_found():
    assert len(HINTS) > 30


def told(text: str) -> list[str]:
    """Return the words of the command that ends a text."""
    return shlex.split(text.partition("titan-loop ")[2])


def two_stages() -> Recipe:
    """A recipe whose source comes from a flag."""
    stages = [tiny_config(Path("nowhere"), Path("unused"), steps=2) for _ in range(2)]
    first, second = (Stage(name=name, config=one) for name, one in zip("ab", stages, strict=True))
    second.parent = first.name
    return Recipe(name="not_the_function", stages=[first, second])


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    run, saved = tmp_path_factory.mktemp("trained") / "run", dict(os.environ)
    compat.skip_final_pause()
    run_recipe(Recipe.of_one_run("tiny", tiny_config(source, run, steps=2)), folder=str(run))
    os.environ.clear()
    os.environ.update(saved)
    gc.enable()  # torchtitan turns it off
    return run


def test_what_upcycle_and_status_advise_trains(alone, trained, tmp_path, capfd):
    run, wide = copytree(trained, tmp_path / "run"), tmp_path / "wide"
    assert main(["upcycle", str(run), "--output", str(wide), "--layers", "4"]) == 0
    advice = capfd.readouterr().out.splitlines()[-1]
    tokens = SavedRun(wide).checkpoint().tokens
    assert main(told(advice)) == 0
    assert SavedRun(wide).checkpoint().tokens == 2 * tokens
    assert SavedRun(wide).config["model"]["n_layers"] == 4

    assert main(["train", str(run), "--total-tokens", str(2 * tokens)]) == 0
    assert SavedRun(run).checkpoint().tokens == 2 * tokens
    rmtree(SavedRun(run).checkpoint().path)  # as if it had been interrupted
    *_, following = status_lines(read_status(tmp_path))
    assert following == f"next: titan-loop train {run}"
    assert main(told(following)) == 0
    assert SavedRun(run).checkpoint().tokens == 2 * tokens
    assert status_lines(read_status(tmp_path))[-1] == "everything is trained"


def test_what_upcycle_advises_for_a_merged_run_trains(alone, trained, source, tmp_path, capfd):
    merged, wide = tmp_path / "merged", tmp_path / "a folder" / "wide"
    assert main(["checkpoint", "merge", str(trained), str(trained), "--output", str(merged)]) == 0
    assert main(["upcycle", str(merged), "--output", str(wide), "--layers", "4"]) == 0
    words = told(capfd.readouterr().out.splitlines()[-1].replace("SOURCE", str(source)))
    assert words[words.index("--from") + 1] == str(wide)
    assert main([*words, "--training.steps", "1", "--training.seq-len", "32"]) == 0
    assert SavedRun(f"{wide}-trained").config["model"]["n_layers"] == 4
    assert main(["train", str(merged)]) == 2
    assert "titan-loop train RECIPE --from RUN" in capfd.readouterr().err


def test_a_stage_that_has_not_begun_is_trained_by_the_recipe_with_its_flags(
    alone, source, tmp_path, capfd
):
    folder, flags = tmp_path / "a folder", ["--dataloader.mixture", f"{source}=1"]
    flags += ["--stages.b.learning-rate", "0:1e-3 constant 1K:1e-3"]
    assert main(["train", RECIPE, "--dump-folder", str(folder), *flags]) == 0
    wanted = SavedRun(folder / "b").config
    rmtree(folder / "b")  # as if it had been stopped before
    assert main(["status", str(folder)]) == 0
    following = capfd.readouterr().out.splitlines()[-1]
    assert main(told(following)) == 0
    assert SavedRun(folder / "b").config == wanted


def test_what_a_report_lacks_is_made(alone, trained, capfd):
    assert main(["report", str(trained)]) == 0
    lacking = re.findall(r"titan-loop (eval [^<]+)", (trained / "report.html").read_text())
    assert len(lacking) == 2
    for command in lacking:
        assert main(shlex.split(command)) == 0
    assert f"titan-loop report {trained} makes a page" in capfd.readouterr().out
    assert main(["report", str(trained)]) == 0
    assert "titan-loop eval" not in (trained / "report.html").read_text()
