"""`titan-loop analyse VERB RUN`: analyses of a run, which plug-ins register by name."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titan_loop.cli.arguments import HELP, command, list_verbs
from titan_loop.errors import EXIT_OK, UserError, nearest
from titan_loop.plugins import find, names, summary

if TYPE_CHECKING:
    from titan_loop.analysis.steps.findings import Findings


def run(words: Sequence[str]) -> int:
    """Run one analysis, or list them all without a verb."""
    verb, *rest = words or ["--help"]
    if verb in HELP:
        list_verbs("analyse", {name: summary("analyses", name) for name in names("analyses")})
        return EXIT_OK
    analysis = find("analyses", verb)
    if analysis is None:
        raise UserError(f"unknown verb 'analyse {verb}'{nearest(verb, names('analyses'))}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return command(f"analyse {verb}")(_shown(analysis))(rest)


def _shown(analysis: Callable[..., "Findings"]) -> Callable[..., None]:
    @functools.wraps(analysis)
    def shown(*arguments: object, **flags: object) -> None:
        findings = analysis(*arguments, **flags)
        print(findings.text())
        for path in findings.save():
            print(path)

    return shown
