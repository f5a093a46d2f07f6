"""Verbs as plain functions: tyro reads their flags, and a mistake becomes one line.

    verb function (types, defaults, Google docstring)
      ── command ──▶ run(words) ── tyro.cli ──▶ the function's arguments ──▶ exit code
                                      └── its error page ──▶ UserError

Parameters before the `*` are positional arguments and parameters after it are flags. A dataclass
may stand on either side: its fields are flags. `Args:` becomes `--help`.
"""

import contextlib
import functools
import inspect
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

# tyro checks list defaults with typeguard, which would read every installed package's entry points.
os.environ.setdefault("TYPEGUARD_DISABLE_PLUGIN_AUTOLOAD", "1")

import tyro
from tyro.conf import (
    FlagCreatePairsOff,
    OmitArgPrefixes,
    Positional,
    PositionalMetavarFromFieldName,
    UseAppendAction,
)
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from titan_loop.errors import EXIT_OK, UserError, nearest
from titan_loop.plugins import Verb, load
from titan_loop.tables import columns

Run = Callable[[Sequence[str]], int]
"""Takes the words after a verb and returns the exit code."""

HELP = {"-h", "--help"}
_FLAGS = "flags"
_FREE_TEXT = {"--sbatch", "--prompt", "--stop"}  # flags whose text may begin with dashes

# What Python says of a text that is not a number.
_NO_NUMBER = {
    "could not convert string to float": r"\1=\2 is not a number; write it like 0.1 or 1e-4",
    r"invalid literal for int\(\) with base 10": r"\1=\2 is not a whole number; write it like 2000",
}

_registry = ConstructorRegistry()


def command(name: str) -> Callable[[Callable[..., Any]], Run]:
    """Return a decorator that turns a function into the `run(words)` of a verb.

    The function returns an exit code, or lines or paths to print. Its parameter `flags`, if it has
    one, receives all flags that it does not declare: they belong to the recipe, which is the first
    word, and `--help` after it lists the recipe's fields. `run` raises `UserError` for a mistake in
    the words, and `SystemExit` with code 0 after printing `--help`.
    """

    def decorated(function: Callable[..., Any]) -> Run:
        @functools.wraps(function)
        def run(words: Sequence[str]) -> int:
            result = bind(name, function, words)()
            if isinstance(result, int):
                return result
            if isinstance(result, (str, Path)):
                result = [result]
            for line in result if isinstance(result, (list, Iterator)) else ():
                print(line)
            return EXIT_OK

        return run

    return decorated


def group(name: str, verbs: Mapping[str, Callable[..., Any] | Verb]) -> Run:
    """Return the `run(words)` of a command with verbs of its own, such as `checkpoint ls`.

    A `Verb` names a function that is imported when it is called. Without a verb, or for `--help`,
    the verbs are listed.
    """

    def run(words: Sequence[str]) -> int:
        verb, *rest = words or ["--help"]
        if verb in HELP:
            list_verbs(name, {verb: _summary(function) for verb, function in verbs.items()})
            return EXIT_OK
        if verb not in verbs:
            raise UserError(f"unknown verb '{name} {verb}'{nearest(verb, verbs)}")
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        return command(f"{name} {verb}")(load(verbs[verb]))(rest)

    return run


def _summary(function: Callable[..., Any] | Verb) -> str:
    if isinstance(function, Verb):
        return function.summary
    return (function.__doc__ or "").splitlines()[0]


def list_verbs(name: str, summaries: Mapping[str, str]) -> None:
    """Print the verbs of a command with a line about each."""
    print(f"usage: titan-loop {name} VERB [ARGUMENTS]\n\nverbs:")
    for line in columns(summaries.items(), left=(0, 1)):
        print(f"  {line}")
    print(f"\nFor details: titan-loop {name} VERB --help")


def bind(name: str, function: Callable[..., Any], words: Sequence[str]) -> functools.partial[Any]:
    """Return `function` with the arguments that `words` give it; errors are as in `command`."""
    signature = inspect.signature(function)
    passes_on = _FLAGS in signature.parameters
    add_help = True
    if passes_on:
        words = words or ["--help"]
        add_help = words[0] in HELP
        if not add_help and words[0].startswith("-"):
            raise UserError(f"{name}: the recipe comes first, before {words[0]}")

    def bound(*positional: Any, **named: Any) -> Callable[..., Any]:
        return functools.partial(function, *positional, **named)

    parameters = [_marked(p) for p in signature.parameters.values() if p.name != _FLAGS]
    vars(bound)["__signature__"] = signature.replace(parameters=parameters)
    bound.__annotations__ = {p.name: p.annotation for p in parameters}
    help_text = re.split(r"\n\n(?:Returns|Raises|Source):", inspect.getdoc(function) or "")[0]
    # tyro would keep the line breaks within an entry of `Args:`.
    bound.__doc__ = re.sub(r"\n {8}(?=\S)", " ", help_text)
    words = [*_with_free_text(words)]
    options: dict[str, Any] = {
        "args": words,
        "prog": f"titan-loop {name}",
        "config": (FlagCreatePairsOff, PositionalMetavarFromFieldName, OmitArgPrefixes),
        "registry": _registry,
        "add_help": add_help,
    }
    with one_line_errors(words, name):
        if not passes_on:
            return tyro.cli(bound, **options)
        call, rest = tyro.cli(bound, return_unknown_args=True, **options)
        return functools.partial(call, **{_FLAGS: rest})


def _with_free_text(words: Sequence[str]) -> Iterator[str]:
    """Write `--prompt TEXT` as `--prompt=TEXT`; tyro reads this even if TEXT begins with dashes."""
    rest = iter(words)
    for word in rest:
        text = next(rest, None) if word in _FREE_TEXT else None
        yield word if text is None else f"{word}={text}"


@contextlib.contextmanager
def one_line_errors(words: Sequence[str], name: str = "") -> Iterator[None]:
    """Turn the page that tyro prints about a mistake into a `UserError` of one line."""
    if HELP & {*words}:
        yield
        return
    page, columns_before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"  # so wide that tyro breaks no line
    try:
        # stdout as well: tyro looks at it to decide on colours and frames.
        with contextlib.redirect_stderr(page), contextlib.redirect_stdout(page):
            yield
    except SystemExit:
        see = f"; see titan-loop {name} --help" if name else ""
        raise UserError(f"{f'{name}: ' * bool(name)}{_joined(page.getvalue())}{see}") from None
    finally:
        os.environ.pop("COLUMNS")
        if columns_before is not None:
            os.environ["COLUMNS"] = columns_before
    sys.stderr.write(page.getvalue())  # warnings


def _joined(page: str) -> str:
    """Return the sentences of tyro's page, without its title, ruled lines and help of flags."""
    parts: list[str] = []
    for line in page.splitlines()[2:]:
        text = line.strip()
        if text.startswith(("For full helptext", "Argument helptext")):
            break
        if not text.strip("-"):
            parts.append("")
        elif len(line) - len(line.lstrip()) < 10:  # texts of flags are indented further
            parts[-1:] = [" ".join([*parts[-1:], text]).strip()]
    text = "; ".join(part.rstrip(".:") for part in parts if part)
    for kind, problem in _NO_NUMBER.items():
        optional = r"(?:no type matching .*)?"  # with the errors of each type
        text = re.sub(rf"Error parsing (\S+): {optional}{kind}: '(.*?)'.*", problem, text)
    return re.sub(r"^Error parsing (\S+): (?=\1\.)", "", text)  # the message names the field itself


def _marked(parameter: inspect.Parameter) -> inspect.Parameter:
    kind = parameter.annotation
    if isinstance(kind, UnionType):
        # For `X | Y`, but not for Union, tyro imports typeguard, which opens twelve files.
        kind = Union[get_args(kind)]  # noqa: UP007
        parameter = parameter.replace(annotation=kind)
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or is_dataclass(kind):
        return parameter
    return parameter.replace(annotation=Annotated[kind, Positional])


@_registry.primitive_rule
def list_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read `tuple[int, ...]` and `list[str]`; commas may separate numbers and a list's values."""
    origin, (kind, *others) = get_origin(info.type), get_args(info.type) or (None,)
    if origin not in (tuple, list) or kind not in (str, int, float, Path):
        return None
    if others not in ([], [...]) or UseAppendAction in info.markers:  # a value for each flag
        return None
    commas = origin is list or kind in (int, float)

    def read(words: list[str]) -> Any:
        parts = [part for word in words for part in (word.split(",") if commas else [word])]
        if not parts:
            raise ValueError("at least one value is needed")
        return origin(map(kind, parts))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{kind.__name__.upper()} ...",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, origin),
        str_from_instance=lambda value: [str(entry) for entry in value] or ["none"],
    )
