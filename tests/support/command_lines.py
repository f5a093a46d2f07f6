"""Command lines that a text prints, and a check that the program accepts one without running it."""

import re
import shlex
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import titan_loop.compat as compat

from titan_loop.cli import arguments, main
from titan_loop.cli.stage_flags import PREFIX, resolve_recipe
from titan_loop.errors import UserError
from titan_loop.recipes.registry import load_recipe, recipe_summaries

INLINE = re.compile(r"`titan-loop ([^`]+)`")
PLACEHOLDERS = {
    **{"RECIPE": "quickstart", "RUN": "runs/my", "SIZE-rR": "134m-r1"},
    **{"N": "1", "SOURCE=1": "sources/my=1"},
}
OWN = ("first:", "my_recipe:", "my_package.", "PACKAGE.")
"""Beginnings of a reader's own recipes."""
MISSING = re.compile(r": Missing from titan-loop|at least one value is needed")


class AcceptedError(Exception):
    """The command line was accepted, as this call."""


def accept(words: list[str], *, in_part: bool = False) -> None:
    """Parse what follows `titan-loop` as the program does; raise `UserError` where it would.

    The flags of a recipe are applied to it; a run's folder, which need not exist, is taken for a
    run of the quick start.

    Args:
        in_part: Whether required arguments may be left out, as prose does.
    """
    bind = arguments.bind

    def stop(*given: Any) -> None:
        raise AcceptedError(bind(*given))

    if words[0] == "lm_eval":
        if not in_part:
            _accept_harness(words)
        return
    try:
        with patch.object(arguments, "bind", stop):
            main._dispatch(words)
        assert in_part or words[-1] == "--help", f"{words} prints the list of its verbs"
    except AcceptedError as accepted:
        (call,) = accepted.args
        if "recipe" in call.keywords and "flags" in call.keywords:
            _apply_flags(words, call.keywords)
    except UserError as error:
        if not (in_part and MISSING.search(str(error))):
            raise


def _apply_flags(words: list[str], given: dict[str, Any]) -> None:
    recipe, flags = given["recipe"], given["flags"]
    if recipe.startswith(OWN):
        return  # what it is made of is the reader's
    if not (":" in recipe or recipe in recipe_summaries()):
        assert "/" in recipe, f"{words}: {recipe} is no recipe"  # a run's folder
        recipe = "quickstart"
    only = given.get("stage")
    if not flags or {"--help", "--help-all"} & {*flags}:
        load_recipe(recipe).chosen(only)
        return
    if not any(flag.startswith(PREFIX) for flag in flags):
        only = only or load_recipe(recipe).stages[0].name  # the others take the same flags
    with compat.assuming("cuda"):
        resolve_recipe(recipe, flags, only=only)


def _accept_harness(words: list[str]) -> None:
    def stop(*_: object) -> None:
        raise AcceptedError

    with patch("lm_eval._cli.HarnessCLI.execute", stop):
        try:
            main._dispatch(words)
        except AcceptedError:
            return
    raise AssertionError(words)


def refused(captured: Any, *words: object, code: int = 2) -> str:
    """Run a command that must fail; return its one line on stderr, without the beginning."""
    captured.readouterr()
    assert main.main([*map(str, words)]) == code
    (line,) = captured.readouterr().err.splitlines()
    assert line.startswith("titan-loop: error: ")
    return line.removeprefix("titan-loop: error: ")


def examples_of(docstring: str) -> str:
    """Return the examples of a help text, as a block of Markdown."""
    _, _, rest = docstring.partition("For example:\n")
    return rest.partition("\n\n")[0]


def commands_of(text: str) -> Iterator[tuple[list[str], bool]]:
    """Yield the words after `titan-loop` of each command in Markdown, and whether prose has it.

    A line of a block is a whole command; prose names commands in part.
    """
    fenced = False
    prose: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and "`titan-loop" not in line:
            if "titan-loop " in line or "-m titan_loop " in line:
                yield from ((words, False) for words in _within(line))
        else:
            prose.append(line)
    for found in INLINE.finditer("\n".join(prose)):
        yield from ((words, True) for words in _within(f"titan-loop {found[1]}"))


def _within(line: str) -> Iterator[list[str]]:
    line = re.sub(r"(\S*)\{([^,{}]+),([^,{}]+)\}", r"\1\2 \1\3", line)  # as a shell expands it
    words = shlex.split(line, comments=True)
    for number, word in enumerate(words):
        if " titan-loop " in f" {word}":
            yield from _within(word)  # `sbatch --wrap '…'`
        elif word == "titan-loop" or words[number - 1 : number + 1] == ["-m", "titan_loop"]:
            rest = words[number + 1 :]
            ends = [place for place, each in enumerate(rest) if each in ("&&", "|", ";", ">")]
            yield [*_filled(rest[: min(ends, default=None)])]


def _filled(words: list[str]) -> Iterator[str]:
    """Put values for placeholders; dots are a value after a flag, and nothing elsewhere."""
    for before, word in zip(["", *words], words, strict=False):
        if word not in ("…", "..."):
            yield PLACEHOLDERS.get(word, word)
        elif before.startswith("--"):
            yield "1"
        elif not any(each.startswith("--") for each in words[: words.index(word)]):
            yield PLACEHOLDERS["RECIPE"]
