"""Set any field of a config from the command line: torchtitan's tyro rules plus `Schedule`'s."""

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_loop.cli.arguments import HELP, list_rule, one_line_errors
from titan_loop.cli.flag_help import WITHOUT_EFFECT, fixed_flags, flags_of, help_text
from titan_loop.errors import EXIT_OK, UserError, nearest
from titan_loop.training.schedule import parse_tokens, register_tyro_rule

Config = TypeVar("Config")

# A flag for tokens; and a count such as 4M or 4e6, which tyro's rule for integers does not read.
_TOKENS_FLAG = re.compile(r"--[\w.-]*tokens")
_SHORT_COUNT = re.compile(r"\d+(\.\d+)?[a-zA-Z]\S*")
_BUILT_STEPS = "--model.recurrent-steps"


def apply_overrides(config: Config, arguments: Sequence[str], program: str) -> Config:
    """Return `config` with the fields given on the command line.

    Args:
        config: A dataclass; nested fields are reached as `--outer.inner-field`.
        arguments: Flags and values; `_` and `-` are equivalent in names, bools are `--flag` and
            `--no-flag`, token counts accept K, M, B and T, spaces or commas separate lists.

    Raises:
        SystemExit: With code 0, after `--help` was printed.
    """
    if not arguments:
        return config
    _register_rules()
    choices, flags = [*_choices(config)], flags_of(config)
    # A choice has flags of its own, which tyro explains.
    if HELP & {*arguments} and not {*choices} & {*arguments}:
        print(help_text(flags, program, choices))
        raise SystemExit(EXIT_OK)
    arguments = ["--help" if word == "--help-all" else word for word in arguments]
    _refuse_without_effect(arguments)
    fixed = tuple(f"{flag}." for flag in fixed_flags(config))
    if useless := [word for word in arguments if f"{_plain(word)}.".startswith(fixed)]:
        raise UserError(_unknown(useless, flags.keys(), choices))
    with one_line_errors(arguments):
        parsed, rest = tyro.cli(
            type(config),
            args=_write_out_token_counts(arguments),
            default=config,
            registry=custom_registry,
            prog=program,
            return_unknown_args=True,
        )
    if rest:
        raise UserError(_unknown(rest, flags.keys(), choices))
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    whole: Any = parsed
    if _BUILT_STEPS in given and not whole.model.reader_of_steps():
        why = "training runs --recurrence.steps, and the run records them"
        raise UserError(f"{_BUILT_STEPS} has no effect: {why}")
    return parsed


def _write_out_token_counts(arguments: Sequence[str]) -> list[str]:
    written: list[str] = []
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.rpartition("=")
        if _TOKENS_FLAG.fullmatch(flag or previous) and _SHORT_COUNT.fullmatch(value):
            argument = f"{flag}{equals}{parse_tokens(value, flag or previous)}"
        written.append(argument)
    return written


@cache  # a rule registered twice would run twice
def _register_rules() -> None:
    ConfigManager.register_tyro_rules(custom_registry)
    custom_registry.primitive_rule(list_rule)
    register_tyro_rule(custom_registry)


def _refuse_without_effect(arguments: Sequence[str]) -> None:
    for word in arguments:
        plain = _plain(word)
        for beginning, why in WITHOUT_EFFECT.items():
            if plain.startswith(beginning):
                raise UserError(f"{word.partition('=')[0]} has no effect: {why}")


def _plain(word: str) -> str:
    """Return the flag without `no-` and value."""
    return re.sub(r"\.no-([\w-]+)$", r".\1", word.partition("=")[0].replace("_", "-"))


def _unknown(words: Sequence[str], flags: Collection[str], choices: Collection[str]) -> str:
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    if not word.startswith("-"):
        return f"unknown argument {word}{nearest(word, choices)}"
    flag = word.replace("_", "-")
    if flag in flags:
        return f"{word} stands after a choice such as activation-checkpoint:full; put it before"
    # `--lr` may stand for `--learning-rate`, `--seed` for `--debug.seed` and `--dataloader.seed`.
    parts = {name: name.rpartition(".")[2].strip("-") for name in flags}
    wanted = flag.rpartition(".")[2].strip("-")
    alike = [
        name
        for name, part in sorted(parts.items())
        if wanted in (part, "".join(word[0] for word in part.split("-")))
    ]
    if alike:
        return f"unknown flag {word}; nearest: {', '.join(alike[:3])}"
    close = nearest(flag, flags)
    if close.startswith("; known"):
        close = "; --help-all lists all flags"
    return f"unknown flag {word}{close}"


def _choices(config: Any) -> Iterator[str]:
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        for option in get_args(hint):
            for mark in getattr(option, "__metadata__", ()):
                yield f"{name.replace('_', '-')}:{mark.name}"
