"""Commands with verbs of their own: `titan-loop data show`, `titan-loop checkpoint ls`."""

import logging
from collections.abc import Callable, Mapping, Sequence

from titan_loop.errors import EXIT_OK, UserError, nearest

Verb = Callable[[Sequence[str]], int | None]
"""Takes the arguments after the verb; returns an exit code, None for success."""


def run_verb(command: str, verbs: Mapping[str, Verb], arguments: Sequence[str]) -> int:
    """Run one verb of a command, or list them.

    Args:
        command: The command's name.
        verbs: Its verbs; the first line of a function's docstring describes it.
        arguments: What follows the command; none, or `--help`, lists the verbs.

    Returns:
        The exit code.

    Raises:
        UserError: There is no such verb.
    """
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help"):
        width = max(map(len, verbs))
        print(f"usage: titan-loop {command} VERB [ARGUMENTS]\n\nverbs:")
        for name, function in verbs.items():
            print(f"  {name:{width}}  {(function.__doc__ or '').splitlines()[0]}")
        print(f"\ntitan-loop {command} VERB --help says more.")
        return EXIT_OK
    if verb not in verbs:
        raise UserError(f"unknown verb '{command} {verb}'{nearest(verb, verbs)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    code = verbs[verb](rest)
    return EXIT_OK if code is None else code
