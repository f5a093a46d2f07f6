"""Commands that the program advises: each is run as printed, or parsed with its values in place.

Every string of the package with `titan-loop VERB …` is a hint. `FOLLOWED` are run by the tests here
as they were printed, `ELSEWHERE` by another test; `PARSED` have real values for what the string
leaves open; `EXCUSED` are no advice. A hint that is in none of them fails.
"""

import ast
import gc
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import titan_loop.compat as compat

import titan_loop
from tests.support.command_lines import accept
from tests.support.tiny import tiny_config
from titan_loop.cli.main import main
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.saved_run import SavedRun
from titan_loop.runs.status import read_status, status_lines

PACKAGE = Path(titan_loop.__file__).parent
# `titan-loop WORDS`, up to a quote or a mark of punctuation; the verb may be a value.
ADVICE = re.compile(
    r"titan-loop ((?:[a-z]\w+(?![\w:])|\{\} (?=VERB|--))(?:[\w./={}…-]|:(?=\S)| (?! ))*)"
)
RECIPE = "tests.cli.test_hints:two_stages"
FOLLOWED: set[str] = set()
ELSEWHERE = {
    "runs/conversion.py: train quickstart --from {} --dataloader.mixture SOURCE=1 --learning-rate "
    "1e-4 --dump-folder {}-trained": "tests/families/retrofit/test_run.py::"
    "test_the_command_that_a_retrofit_advises_trains_it",
}
"""Hint → the test that runs it as printed."""
LIST = "convert export runs/my --list"
PARSED = {
    # `results add` refuses uncommitted code; tests/analysis adds results.
    "analysis/results.py: results add RUN": "results add runs/my",
    "analysis/results.py: train RECIPE": "train quickstart",
    "checkpoint/manager.py: convert export": "convert export runs/my --output mine",
    "checkpoint/manager.py: convert import": "convert import mine --output runs/my",
    "families/retrofit/surgery.py: retrofit --list": "retrofit --list",
    "formats/importing.py: retrofit --list": "retrofit --list",
    "cli/arguments.py: {} --help": "eval --help",
    "cli/arguments.py: {} VERB --help": "data pack --help",
    "cli/flag_help.py: convert export": "convert export runs/my --output mine",
    "cli/lm_eval.py: eval": "eval runs/my --tasks mano",
    "cli/lm_eval.py: lm_eval ls tasks": "lm_eval ls tasks",
    "cli/main.py: train quickstart --total-tokens 200000": "train quickstart --total-tokens 200000",
    "cli/slurm.py: slurm status {}": "slurm status runs/my",
    "cli/views.py: scaling {}": "scaling runs/a runs/b",
    "data/packed_index.py: data pack {} --seq-len {}": "data pack sources/my --seq-len 256",
    "data/source_card.py: data tokenize": "data tokenize my --output sources/my --tokenizer a.json",
    "formats/llama_shape.py: convert export RUN --list": LIST,
    "recipes/starting_point.py: convert import {} --output {}": "convert import a --output runs/a",
    "runs/saved_run.py: eval {} --tasks {}": "eval runs/my --tasks mano",
    # Tokenises all of Python's installation; the quick start in CI runs it.
    "data/source_card.py: data demo": "data demo",
    "evaluation/harness_tasks.py: eval": "eval runs/my --tasks offline",
    "evaluation/suites.py: eval": "eval runs/my",
    "evaluation/while_training.py: eval": "eval runs/my",
    "families/moe/formats.py: convert export RUN --list": LIST,
    "formats/gguf_tokenizer.py: convert export RUN --list": LIST,
    "launch/local.py: slurm submit": "slurm submit quickstart --nodes 1 --gpus-per-node 8 "
    "--time 1:00:00",
    "launch/slurm.py: slurm submit": "slurm submit quickstart --nodes 1 --gpus-per-node 8 "
    "--time 1:00:00",
    "launch/submit.py: slurm cancel {}": "slurm cancel runs/my",
}
"""Hint → its command with values."""
EXCUSED = {
    "cli/arguments.py: {} VERB": "usage of a group, above the list of its verbs",
    "training/evaluation_config.py: eval": "says that nothing can score a source",
}


def hints() -> Iterator[tuple[str, str]]:
    """Yield (place, `FILE: words after titan-loop`) of every string but docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name, nodes = path.relative_to(PACKAGE), [*ast.walk(ast.parse(path.read_text()))]
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
                yield f"{name}:{node.lineno}", f"{name}: {found[1].strip()}"


def follows(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that runs these hints as they were printed."""
    FOLLOWED.update(keys)
    return lambda test: test


def told(text: str, key: str) -> list[str]:
    """Return the words of a hint as they stand in what was printed."""
    words = key.partition(": ")[2]
    pattern = re.escape(f"titan-loop {words}").replace(r"\{\}\ ", r"[^\n;,)<]+?\ ")
    pattern = pattern.replace(r"\{\}", r"[^\s;,)<]+")
    (found,) = set(re.findall(pattern, text))
    return shlex.split(found)[1:]


def test_every_hint_is_tested():
    known = sorted([*FOLLOWED, *ELSEWHERE, *PARSED, *EXCUSED], key=len, reverse=True)
    assert len(known) == len({*known})
    met: set[str] = set()
    for place, hint in hints():
        key = next((key for key in known if re.match(re.escape(key) + r"(?!\S)", hint)), None)
        assert key, f"{place}: no test runs or parses `{hint}`: add it to {__name__}"
        untested = re.search(r"\{\}|--", hint.removeprefix(key))
        assert untested is None, f"{place}: not all of `{hint}` is tested in {__name__}"
        met.add(key)
    assert {*known} - met == set(), "no such hint is left in the code"
    own = Path(__file__).read_text()
    assert [key for key in FOLLOWED if own.count(f'"{key}"') < 2] == [], "no test reads it"


@pytest.mark.parametrize(("key", "test"), ELSEWHERE.items(), ids=[*ELSEWHERE])
def test_a_hint_that_another_test_runs(key: str, test: str):
    path, _, name = test.partition("::")
    assert f"def {name}(" in (PACKAGE.parent / path).read_text(), key


@pytest.mark.parametrize(("key", "command"), PARSED.items(), ids=[*PARSED])
def test_a_hint_that_is_parsed(key: str, command: str):
    open_word = r"\{\}|VERB|RUN|RECIPE|FOLDER|FILE|NAME|L(?= |$)"
    words = re.split(open_word, key.partition(": ")[2])
    assert re.match(r"\S+".join(map(re.escape, words)) + r"(?!\S)", command)
    accept(command.split())


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


Captured = pytest.CaptureFixture[str]


@follows("cli/views.py: train {} --total-tokens {}", "runs/status.py: train {}")
def test_what_upcycle_and_status_advise_trains(
    alone: None, trained: Path, tmp_path: Path, capfd: Captured
):
    run, wide = copytree(trained, tmp_path / "run"), tmp_path / "wide"
    assert main(["upcycle", str(run), "--output", str(wide), "--layers", "4"]) == 0
    advice = capfd.readouterr().out.splitlines()[-1]
    tokens = SavedRun(wide).checkpoint().tokens
    assert main(told(advice, "cli/views.py: train {} --total-tokens {}")) == 0
    assert SavedRun(wide).checkpoint().tokens == 2 * tokens
    assert SavedRun(wide).config["model"]["n_layers"] == 4

    assert main(["train", str(run), "--total-tokens", str(2 * tokens)]) == 0
    assert SavedRun(run).checkpoint().tokens == 2 * tokens
    rmtree(SavedRun(run).checkpoint().path)  # as if it had been interrupted
    *_, following = status_lines(read_status(tmp_path))
    assert following == f"next: titan-loop train {run}"
    assert main(told(following, "runs/status.py: train {}")) == 0
    assert SavedRun(run).checkpoint().tokens == 2 * tokens
    assert status_lines(read_status(tmp_path))[-1] == "everything is trained"


@follows("cli/views.py: train PACKAGE.MODULE:FUNCTION", "runs/status.py: train {}")
def test_a_stage_that_has_not_begun_is_trained_by_the_recipe_with_its_flags(
    alone: None, source: Path, tmp_path: Path, capfd: Captured
):
    assert main(["recipes"]) == 0
    words = told(capfd.readouterr().out, "cli/views.py: train PACKAGE.MODULE:FUNCTION")
    words[1] = words[1].replace("PACKAGE.MODULE:FUNCTION", RECIPE)
    folder, flags = tmp_path / "a folder", ["--dataloader.mixture", f"{source}=1"]
    flags += ["--stages.b.learning-rate", "0:1e-3 constant 1K:1e-3"]
    assert main([*words, "--dump-folder", str(folder), *flags]) == 0
    wanted = SavedRun(folder / "b").config
    rmtree(folder / "b")  # as if it had been stopped before
    assert main(["status", str(folder)]) == 0
    following = capfd.readouterr().out.splitlines()[-1]
    assert main(shlex.split(following.partition("titan-loop ")[2])) == 0
    assert SavedRun(folder / "b").config == wanted


@follows(
    "analysis/report.py: eval {}",
    "analysis/report.py: eval {} --tasks {} --frontier",
    "cli/eval.py: report {}",
)
def test_what_a_report_lacks_is_made(alone: None, trained: Path, capfd: Captured):
    assert main(["report", str(trained)]) == 0
    text = (trained / "report.html").read_text()
    assert main(told(text, "analysis/report.py: eval {} --tasks {} --frontier")) == 0
    assert main(told(text, "analysis/report.py: eval {}")) == 0
    assert main(told(capfd.readouterr().out, "cli/eval.py: report {}")) == 0
    assert "titan-loop eval" not in (trained / "report.html").read_text()
