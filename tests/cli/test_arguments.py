"""Verbs as functions: words become arguments, and a mistake becomes one line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from titan_loop.cli.arguments import bind
from titan_loop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fields that are flags.

    Attributes:
        limit: Most documents.
    """

    limit: int | None = None


def verb(
    run: Path,
    options: Options,
    *,
    depths: tuple[int, ...] = (1,),
    tags: tuple[str, ...] = ("a",),
    mixture: list[str] | None = None,
    prompt: str = "",
    fast: bool = False,
) -> Any:
    """Do it.

    Args:
        run: Run directory, on a line that
            goes on.
        depths: Depths to score.
    """
    return run, options.limit, depths, tags, mixture, prompt, fast


def call(*words: str) -> Any:
    return bind("do", verb, words)()


def test_commas_separate_numbers_and_values_of_lists_but_not_texts():
    assert call("r", "--depths", "1,2", "3")[2] == (1, 2, 3)
    assert call("r", "--tags", "a,b", "c")[3] == ("a,b", "c")
    assert call("r", "--mixture", "x=1,y=2")[4] == ["x=1", "y=2"]


@pytest.mark.parametrize("words", [("--prompt", "--dashes"), ("--prompt=--dashes",)])
def test_free_text_may_begin_with_dashes(words: tuple[str, ...]):
    assert call("r", *words)[5] == "--dashes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"do: .*; see titan-loop do --help$"),
        (("r", "--limit", "x"), r"do: .*limit.*; see titan-loop do --help$"),
        (("r", "--depths"), r"do: .*at least one value is needed"),
        (("r", "--limits", "3"), r"do: .*--limits"),
        (("r", "--prompt"), r"do: .*prompt"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str, capsys):
    with pytest.raises(UserError, match=message) as caught:
        call(*words)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_help_is_printed_with_the_arguments_texts(capsys):
    with pytest.raises(SystemExit) as caught:
        call("--help")
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Run directory, on a line that goes on." in printed
    assert "titan-loop do" in printed


def train(recipe: str, *, folder: str = "", flags: list[str]) -> list[str]:
    """Train.

    Args:
        recipe: Name.
    """
    return [recipe, folder, *flags]


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["quick"], ["quick", ""]),
        (["quick", "--folder", "x", "--adamw.lr", "1"], ["quick", "x", "--adamw.lr", "1"]),
        (["quick", "--help"], ["quick", "", "--help"]),  # lists the recipe's fields
    ],
)
def test_a_recipe_comes_first_and_its_flags_are_passed_on(words: list[str], result: list[str]):
    assert bind("train", train, words)() == result


def test_a_recipe_that_does_not_come_first():
    with pytest.raises(UserError, match="train: the recipe comes first, before --folder"):
        bind("train", train, ["--folder", "x", "quick"])
