"""Set any field of a config from the command line: torchtitan's tyro rules plus `Schedule`'s."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_loop.cli.arguments import one_line_errors, unknown
from titan_loop.errors import UserError
from titan_loop.training.schedule import Schedule, parse_tokens, register_tyro_rule

Config = TypeVar("Config")

# A flag of tokens, and a count with the suffix that tyro's rule for integers does not read.
_TOKENS_FLAG = re.compile(r"--[\w.-]*tokens")
_SUFFIXED_COUNT = re.compile(r"\d+(\.\d+)?[KMBT]")


def apply_overrides(config: Config, arguments: Sequence[str], program: str) -> Config:
    """Return `config` with the fields given on the command line.

    Args:
        config: A dataclass; nested fields are reached as `--outer.inner-field`.
        arguments: Flags and values, `_` and `-` alike in names; `--flag` and `--no-flag` for bools.
            Token counts accept K, M, B and T (`--total-tokens 100M`).
        program: Command that `--help` names.

    Raises:
        UserError: For an unknown flag, with the nearest known ones, or a value that does not fit.
        SystemExit: With code 0, after `--help` was printed.
    """
    if not arguments:
        return config
    _register_rules()
    flags = list(_flags(config))
    with one_line_errors(flags):
        parsed, rest = tyro.cli(
            type(config),
            args=_write_out_token_counts(arguments),
            default=config,
            registry=custom_registry,
            prog=program,
            return_unknown_args=True,
        )
    if rest:
        raise UserError(unknown(rest, flags, _choices(config)))
    return parsed


def _write_out_token_counts(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--…tokens 100M` and `--…tokens=100M` as plain numbers."""
    written: list[str] = []
    previous = ""
    for argument in arguments:
        flag, equals, value = (
            argument.partition("=") if "=" in argument else (previous, "", argument)
        )
        if _TOKENS_FLAG.fullmatch(flag) and _SUFFIXED_COUNT.fullmatch(value):
            written.append(f"{flag}=" * bool(equals) + str(parse_tokens(value)))
        else:
            written.append(argument)
        previous = argument
    return written


@cache  # a rule registered twice would run twice
def _register_rules() -> None:
    ConfigManager.register_tyro_rules(custom_registry)
    register_tyro_rule(custom_registry)


def _flags(config: Any, prefix: str = "--") -> Iterator[str]:
    """Yield the flag of every field, nested ones included."""
    for field in fields(config):
        if not field.init:
            continue  # follows from the class
        flag = prefix + field.name.replace("_", "-")
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, (type, Schedule)):
            yield from _flags(value, f"{flag}.")
        else:
            yield flag


def _choices(config: Any) -> Iterator[str]:
    """Yield tyro's FIELD:KIND for every field that is a choice, as activation checkpointing is."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        for option in get_args(hint):
            for mark in getattr(option, "__metadata__", ()):
                yield f"{name.replace('_', '-')}:{mark.name}"
