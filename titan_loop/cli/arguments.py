"""Verbs as plain functions: tyro reads their flags, and a mistake becomes one line.

    verb function (types, defaults, Google docstring)
      ── command ──▶ run(words) ── tyro.cli ──▶ the function's arguments ──▶ exit code
                                      └── on_parse_error ──▶ UserError

Parameters before the `*` are positional arguments; those after it are flags, and so are the fields
of a dataclass among them. `Args:` becomes `--help`. tyro's hook for mistakes,
`tyro._errors.on_parse_error`, is private, hence tyro's exact pin; `tests/test_upstream_contract.py`
asserts what is used of it.
"""

import contextlib
import difflib
import functools
import inspect
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

# typeguard, with which tyro checks defaults that are lists, would read all entry points there are.
os.environ.setdefault("TYPEGUARD_DISABLE_PLUGIN_AUTOLOAD", "1")

import tyro
from tyro import _errors as tyro_errors
from tyro.conf import (
    FlagCreatePairsOff,
    OmitArgPrefixes,
    Positional,
    PositionalMetavarFromFieldName,
    UseAppendAction,
)
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from titan_loop.errors import EXIT_OK, UserError, nearest
from titan_loop.tables import columns

Function = TypeVar("Function", bound=Callable[..., int | None])
Run = Callable[[Sequence[str]], int]
"""Takes the words after a verb and returns the exit code."""

_HELP = ("-h", "--help")
_MOST_LISTED = 40
"""Known flags that a message names when none is close."""

_FLAGS = "flags"
_DASHES = "may begin with dashes"
FreeText = Annotated[str, _DASHES]
"""A flag's text, which may begin with dashes unless it is itself a flag of the verb."""

FreeTexts = Annotated[UseAppendAction[tuple[str, ...]], _DASHES]
"""Such a text for each time that the flag is given."""

_recipe_first: set[Callable[..., Any]] = set()
_registry = ConstructorRegistry()


def recipe_first(function: Function) -> Function:
    """Mark a verb whose first word is a recipe; `--help` after it lists the recipe's fields."""
    _recipe_first.add(function)
    return function


def command(name: str, function: Callable[..., int | None]) -> Run:
    """Return the `run(words)` of a verb.

    Args:
        name: Verb as it follows `titan-loop`.
        function: What the verb does; it returns an exit code, None for success. The text of its
            docstring and its `Args:` are `--help`. A parameter `flags` receives the words that are
            not its own, which are flags of a recipe.

    Returns:
        A function that raises `UserError` for an unknown flag, a wrong value or a missing one, and
        `SystemExit` with code 0 after `--help` was printed.
    """

    def run(words: Sequence[str]) -> int:
        code = bind(name, function, words)()
        return EXIT_OK if code is None else code

    return run


def group(name: str, verbs: Mapping[str, Callable[..., int | None]]) -> Run:
    """Return the `run(words)` of a command with verbs of its own, such as `checkpoint ls`.

    Args:
        name: Name of the command.
        verbs: Verb → function as `command` takes it. Without a verb, or for `--help`, they are
            listed with the first line of their docstrings.
    """

    def run(words: Sequence[str]) -> int:
        verb, *rest = words or ["--help"]
        if wants_help(verb):
            list_verbs(name, {n: (verb.__doc__ or "").splitlines()[0] for n, verb in verbs.items()})
            return EXIT_OK
        if verb not in verbs:
            raise UserError(f"unknown verb '{name} {verb}'{nearest(verb, verbs)}")
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        return command(f"{name} {verb}", verbs[verb])(rest)

    return run


def wants_help(word: str) -> bool:
    """Return whether a word asks for help."""
    return word in _HELP


def list_verbs(name: str, summaries: Mapping[str, str]) -> None:
    """Print the verbs of a command with a line about each."""
    print(f"usage: titan-loop {name} VERB [ARGUMENTS]\n\nverbs:")
    for line in columns(summaries.items(), left=(0, 1)):
        print(f"  {line}")
    print(f"\ntitan-loop {name} VERB --help says more.")


def bind(
    name: str, function: Callable[..., int | None], words: Sequence[str]
) -> functools.partial[int | None]:
    """Return `function` with the arguments that `words` give it; `command` says what it raises."""
    signature = inspect.signature(function)
    passes_on = _FLAGS in signature.parameters
    add_help = True
    if function in _recipe_first:
        words = _config_as_recipe(name, words) or ["--help"]
        add_help = words[0] in _HELP
        if not add_help and words[0].startswith("-"):
            raise UserError(f"{name}: the recipe comes first, before {words[0]}")
    parameters = [_marked(p) for p in signature.parameters.values() if p.name != _FLAGS]

    def bound(*positional: Any, **named: Any) -> Callable[..., int | None]:
        return functools.partial(function, *positional, **named)

    vars(bound)["__signature__"] = signature.replace(parameters=parameters)
    bound.__annotations__ = {p.name: p.annotation for p in parameters}
    # tyro would keep the line breaks within an entry of `Args:`.
    bound.__doc__ = re.sub(r"\n {8}(?=\S)", " ", inspect.getdoc(function) or "")
    kinds = dict(_flags(parameters))
    flags = list(kinds)
    words = _with_dashes(words, kinds)
    with one_line_errors(flags, name):
        call, rest = tyro.cli(
            bound,
            args=words,
            prog=f"titan-loop {name}",
            config=(FlagCreatePairsOff, PositionalMetavarFromFieldName, OmitArgPrefixes),
            registry=_registry,
            add_help=add_help,
            return_unknown_args=True,
        )
    if rest and not passes_on:
        raise UserError(f"{name}: {unknown(rest, flags)}")
    return functools.partial(call, **({_FLAGS: rest} if passes_on else {}))


def _config_as_recipe(name: str, words: Sequence[str]) -> Sequence[str]:
    """Return the words after a verb with `--config FILE` as FILE alone, which is a recipe, too."""
    first, equals, file = words[0].partition("=") if words else ("", "", "")
    if first != "--config":
        return words
    words = [file, *words[1:]] if equals else words[1:]
    if not words or not words[0].endswith(".json"):
        raise UserError(f"{name}: --config needs the config.json of a run")
    return words


def one_line_errors(
    flags: Iterable[str], name: str = ""
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which tyro's complaints are raised as `UserError`s of one line.

    Args:
        flags: Flags to suggest for an unknown one.
        name: Verb to name, if any.
    """

    def complain(event: tyro_errors.ParseErrorEvent) -> None:
        what = _describe(event, list(flags))
        if what is None:  # tyro prints its own page and ends with the same exit code
            return
        raise UserError(f"{name}: {what}; see titan-loop {name} --help" if name else what)

    return tyro_errors.on_parse_error(complain)


def unknown(words: Sequence[str], flags: Iterable[str], choices: Iterable[str] = ()) -> str:
    """Say what is wrong with words that belong to no flag or argument.

    Args:
        words: The words left over.
        flags: All flags there are.
        choices: All choices there are, such as `activation-checkpoint:full`.
    """
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    if not word.startswith("-"):
        return f"unknown argument {word}{nearest(word, choices)}"
    known = set(flags)
    if word.replace("_", "-") in known:
        return f"{word} stands after a choice such as activation-checkpoint:full; put it before"
    return f"unknown flag {word}{_alike(word.replace('_', '-'), known)}"


def _alike(flag: str, known: Collection[str]) -> str:
    """Return what somebody may have meant: a flag's last part or its initials, else what is close.

    `--lr` stands for `--learning-rate`, `--seed` for `--debug.seed` and `--dataloader.seed`.
    """
    wanted = flag.rpartition(".")[2].strip("-")
    parts = {name: name.rpartition(".")[2].strip("-") for name in known}
    meant = [
        name
        for name, part in sorted(parts.items())
        if wanted in (part, "".join(word[0] for word in part.split("-")))
    ]
    if meant:
        return f"; nearest: {', '.join(meant[:3])}"
    if not difflib.get_close_matches(flag, known, cutoff=0.5) and len(known) > _MOST_LISTED:
        return "; --help-all lists all flags"
    return nearest(flag, known)


def _describe(event: tyro_errors.ParseErrorEvent, flags: Sequence[str]) -> str | None:
    """Return what is wrong in one line; None for an event without a wording here."""
    match event:
        case tyro_errors.MissingArgs():
            if any(word.startswith("--") for word in event.unrecognized_tokens):
                return unknown(event.unrecognized_tokens, flags)
            missing = (_name(argument.arg) for argument in event.missing_arguments)
            return f"required: {', '.join(missing)}"
        case tyro_errors.BadValue():
            return f"{_name(event.argument)} needs a value"
        case tyro_errors.InvalidChoice():
            choices = ", ".join(event.choices)
            return f"{_name(event.argument)} {event.value} is not one of {choices}"
        case tyro_errors.InstantiationFailure(message=message, argument=argument):
            line = " ".join(message.split()).rstrip(".")
            if argument is None:
                return line
            name, metavar = _name(argument), argument.lowered.metavar
            expected = "" if argument.is_positional() else f"; expected {name} {metavar}"
            return f"{name}: {line}{expected}"
        case _:
            return None


def _name(argument: Any) -> str:
    """Return the flag of an argument as tyro has it, or the name of a positional one."""
    if argument.is_positional():
        return str(argument.lowered.metavar).strip("[]")
    return argument.lowered.name_or_flags[0]


def _marked(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter, marked for tyro if it is a positional argument."""
    kind = parameter.annotation
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or is_dataclass(kind):
        return parameter
    return parameter.replace(annotation=Annotated[kind, Positional])


def _flags(parameters: Iterable[inspect.Parameter]) -> Iterator[tuple[str, Any]]:
    """Yield the flags of a verb with their types, those of dataclasses among its parameters too."""
    for parameter in parameters:
        kinds = {parameter.name: parameter.annotation}
        if is_dataclass(parameter.annotation):
            kinds = {field.name: field.type for field in fields(parameter.annotation)}
        for name, kind in kinds.items():
            if Positional not in getattr(kind, "__metadata__", ()):
                yield f"--{name.rstrip('_').replace('_', '-')}", kind


def _with_dashes(words: Sequence[str], kinds: Mapping[str, Any]) -> list[str]:
    """Return the words with `--FLAG TEXT` as `--FLAG=TEXT` where a text may begin with dashes."""
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        joined.append(word)
        if _DASHES in getattr(kinds.get(word), "__metadata__", ()):
            following = list(itertools.islice(rest, 1))
            if following and following[0] not in kinds:
                joined[-1] += f"={following.pop()}"
            joined += following
    return joined


@_registry.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read `int | None` as an int: None is what a flag is without being given."""
    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    if len(kinds) != 1 or type(None) not in get_args(info.type):
        return None
    (kind,) = kinds
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda words: kind(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _parts(word: str, kind: type) -> list[str]:
    """Return the numbers that commas separate in a word; a text stays whole."""
    return word.split(",") if kind in (int, float) else [word]


@_registry.primitive_rule
def _one_or_more(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read `tuple[int, ...]` as one or more values; tyro would accept none, too."""
    if get_origin(info.type) is not tuple or get_args(info.type)[1:] != (...,):
        return None
    if UseAppendAction in info.markers:
        return None  # a value for each time the flag is given
    kind = get_args(info.type)[0]

    def read(words: list[str]) -> tuple[Any, ...]:
        if not words:
            raise ValueError("at least one value is needed")
        return tuple(kind(part) for word in words for part in _parts(word, kind))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{kind.__name__.upper()} ...",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [str(entry) for entry in value] or ["none"],
    )
