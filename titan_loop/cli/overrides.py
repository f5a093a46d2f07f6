"""Set any field of a config from the command line: torchtitan's tyro rules plus `Schedule`'s."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_loop.cli.arguments import one_line_errors, unknown
from titan_loop.cli.flag_help import WITHOUT_EFFECT, Flag, flags_of, help_text
from titan_loop.errors import EXIT_OK, UserError
from titan_loop.training.schedule import parse_tokens, register_tyro_rule

Config = TypeVar("Config")

# A flag of tokens, and a count such as 4M or 4e6, which tyro's rule for integers does not read.
_TOKENS_FLAG = re.compile(r"--[\w.-]*tokens")
_SHORT_COUNT = re.compile(r"\d+(\.\d+)?([KMBT]|[eE]\+?\d{1,2})")


def apply_overrides(config: Config, arguments: Sequence[str], program: str) -> Config:
    """Return `config` with the fields given on the command line.

    Args:
        config: A dataclass; nested fields are reached as `--outer.inner-field`.
        arguments: Flags and values, `_` and `-` alike in names; `--flag` and `--no-flag` for bools.
            Token counts accept K, M, B and T (`--total-tokens 100M`), lists spaces and commas.
        program: Command that `--help` names.

    Raises:
        UserError: For an unknown flag, with the nearest known ones, or a value that does not fit.
        SystemExit: With code 0, after `--help` was printed.
    """
    if not arguments:
        return config
    _register_rules()
    choices = list(_choices(config))
    if not set(choices).intersection(arguments):  # whose own flags tyro explains
        for word in {"-h", "--help", "--help-all"}.intersection(arguments):
            print(help_text(config, program, choices, everything=word == "--help-all"))
            raise SystemExit(EXIT_OK)
    known = list(flags_of(config))
    flags = [flag.name for flag in known]
    _refuse_without_effect(arguments)
    with one_line_errors(flags):
        parsed, rest = tyro.cli(
            type(config),
            args=_with_plain_lists(_write_out_token_counts(arguments), known, choices),
            default=config,
            registry=custom_registry,
            prog=program,
            return_unknown_args=True,
        )
    if rest:
        raise UserError(unknown(rest, flags, choices))
    return parsed


def _write_out_token_counts(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--…tokens 100M` and `--…tokens=100M` as plain numbers."""
    written: list[str] = []
    previous = ""
    for argument in arguments:
        flag, equals, value = (
            argument.partition("=") if "=" in argument else (previous, "", argument)
        )
        if _TOKENS_FLAG.fullmatch(flag) and _SHORT_COUNT.fullmatch(value):
            written.append(f"{flag}=" * bool(equals) + str(parse_tokens(value)))
        else:
            written.append(argument)
        previous = argument
    return written


@cache  # a rule registered twice would run twice
def _register_rules() -> None:
    ConfigManager.register_tyro_rules(custom_registry)
    register_tyro_rule(custom_registry)


def _refuse_without_effect(arguments: Sequence[str]) -> None:
    """Refuse torchtitan's flags that nothing here follows."""
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        plain = re.sub(r"\.no-([\w-]+)$", r".\1", flag)
        for beginning, why in WITHOUT_EFFECT.items():
            if plain.startswith(beginning):
                raise UserError(f"{flag} has no effect: {why}")


def _with_plain_lists(
    arguments: Sequence[str], flags: Sequence[Flag], choices: Sequence[str]
) -> list[str]:
    """Return the arguments with lists as tyro's rules read them: text by commas, numbers by spaces.

    Args:
        arguments: Lists in them are separated by spaces or by commas.
        flags: All flags.
        choices: Words that end a list, such as `activation-checkpoint:full`.
    """
    kinds = {flag.name: flag.kind for flag in flags if flag.kind in (list[str], list[int])}
    words, written = [*arguments], []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        kind = kinds.get(name.replace("_", "-")) if word.startswith("--") else None
        if kind is None:
            written.append(word)
            continue
        values = [value] if equals else []
        while words and not words[0].startswith("--") and words[0] not in choices:
            values.append(words.pop(0))
        parts = [part for text in values for part in text.split(",")]
        written += [name, *([",".join(parts)] if kind == list[str] and parts else parts)]
    return written


def _choices(config: Any) -> Iterator[str]:
    """Yield tyro's FIELD:KIND for every field that is a choice, as activation checkpointing is."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        for option in get_args(hint):
            for mark in getattr(option, "__metadata__", ()):
                yield f"{name.replace('_', '-')}:{mark.name}"
