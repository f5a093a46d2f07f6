"""Set any field of a config from the command line: torchtitan's tyro rules plus `Schedule`'s.

tyro answers a mistake with a framed page; here it becomes one line that names the flag, the value
and what was expected.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_loop.errors import EXIT_OK, UserError, nearest
from titan_loop.training.schedule import Schedule, parse_tokens, register_tyro_rule

Config = TypeVar("Config")

_FRAME = re.compile(r"^[╭╰│─\s]+|[╮╯│─\s]+$")
# A flag of tokens, and a count with the suffix that tyro's rule for integers does not read.
_TOKENS_FLAG = re.compile(r"--[\w.-]*tokens")
_SUFFIXED_COUNT = re.compile(r"\d+(\.\d+)?[KMBT]")
_CHOICES = re.compile(r"\b[\w.-]+:[\w-]+\b")  # tyro's subcommands, FIELD:KIND
_UNFOLDED_COLUMNS = "10000"  # wide enough for tyro not to wrap a sentence


def apply_overrides(config: Config, arguments: Sequence[str], program: str) -> Config:
    """Return `config` with the fields given on the command line.

    Args:
        config: A dataclass; nested fields are reached as `--outer.inner-field`.
        arguments: Flags and values, `_` and `-` alike in names; `--flag` and `--no-flag` for bools.
            Token counts accept K, M, B and T (`--total-tokens 100M`).
        program: How `--help` calls the command.

    Raises:
        UserError: For an unknown flag, with the nearest known ones, or a value that does not fit.
        SystemExit: With code 0, after `--help` was printed.
    """
    if not arguments:
        return config
    _register_rules()
    arguments = _write_out_token_counts(arguments)
    if {"-h", "--help"}.intersection(arguments):
        return _parse(config, arguments, program)
    complaint = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _UNFOLDED_COLUMNS
    try:
        with contextlib.redirect_stderr(complaint):
            return _parse(config, arguments, program)
    except SystemExit as stop:
        if stop.code == EXIT_OK:
            raise
        raise UserError(_one_line(complaint.getvalue(), config)) from None
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns


def take_flag(flags: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Return the flags without one that is no field of a config, and its value.

    Args:
        flags: As `apply_overrides` takes them.
        flag: Written as `--flag VALUE` or `--flag=VALUE`; the last one counts.

    Raises:
        UserError: The flag stands there without a value.
    """
    rest: list[str] = []
    value = None
    remaining = iter(flags)
    for word in remaining:
        name, equals, text = word.partition("=")
        if name.replace("_", "-") != flag:
            rest.append(word)
            continue
        value = text if equals else next(remaining, None)
        if value is None:
            raise UserError(f"{flag} needs a value")
    return rest, value


def _parse(config: Config, arguments: Sequence[str], program: str) -> Config:
    return tyro.cli(
        type(config), args=list(arguments), default=config, registry=custom_registry, prog=program
    )


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


def _one_line(page: str, config: Any) -> str:
    """Condense tyro's page to the sentence that says what is wrong."""
    # What a config logs while it is built stands before the frame.
    framed = (_FRAME.sub("", line) for line in page[max(page.find("╭"), 0) :].splitlines())
    lines = [line for line in framed if line]
    sentence = lines[min(1, len(lines) - 1)] if lines else "the command line is not understood"
    if re.match(r"Unrecognized or misplaced options", sentence):
        # Below stand the flags that would fit earlier, as "--total-tokens (applied to …)".
        flag = next((line.split()[0] for line in lines if line.startswith("--")), "the flag")
        return f"{flag} stands after a choice such as activation-checkpoint:full; put it before"
    unknown = re.match(r"Unrecognized options: (.*)", sentence)
    if unknown:
        words = unknown[1].split(", ")
        flag = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        if not flag.startswith("-"):
            words = {word.strip() for line in lines for word in _CHOICES.findall(line)}
            choices = sorted(words - {flag})
            return f"unknown argument {flag}{nearest(flag, choices)}"
        return f"unknown flag {flag}{nearest(flag.replace('_', '-'), _flags(config))}"
    expected = next((line for line in lines if line.startswith("--")), "")
    sentence = sentence.removeprefix("Error parsing ").rstrip(".")
    return f"{sentence}; expected {expected}" if expected else sentence


def _flags(config: Any, prefix: str = "--") -> Iterator[str]:
    """Yield the flag of every field, nested ones included."""
    for field in fields(config):
        flag = prefix + field.name.replace("_", "-")
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, (type, Schedule)):
            yield from _flags(value, f"{flag}.")
        else:
            yield flag
