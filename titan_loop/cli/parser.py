"""argparse whose mistakes are `UserError`s: one line, with the nearest flags."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from titan_loop.errors import UserError, nearest


class Parser(argparse.ArgumentParser):
    """The parser of one verb.

    Args:
        verb: What follows `titan-loop` on the command line.
        description: What it does, for `--help`.
    """

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(
            prog=f"titan-loop {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self._verb = verb

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong as a `UserError`."""
        raise UserError(f"{self._verb}: {message}; see titan-loop {self._verb} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments.

        Raises:
            UserError: For an unknown flag, with the nearest known ones, or a wrong value.
        """
        flags = [flag for action in self._actions for flag in action.option_strings]
        for argument in arguments:
            if argument == "--":
                break
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag not in flags:
                raise UserError(f"{self._verb}: unknown flag {flag}{nearest(flag, flags)}")
        return self.parse_args(arguments)

    def parse_some(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments known here; return the others as they are, for another parser.

        Raises:
            UserError: For a wrong value, or a word without a flag that is not known here.
        """
        return self.parse_known_args(arguments)
