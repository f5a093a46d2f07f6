"""`titan-loop lm_eval …`: lm-evaluation-harness' own command with the model `titan_loop` added.

The harness (0.4.13) finds models in a table of its own and has no plugin mechanism, so a plain
`lm_eval` does not know the model. This verb registers it and hands over all flags.
"""

import sys
from collections.abc import Sequence
from unittest.mock import patch

from titan_loop.errors import EXIT_OK, UserError

# Beginning of a harness message about a user's mistake → hint.
_MISTAKES = {
    "Tasks not found": "`titan-loop lm_eval ls tasks` lists them, `titan-loop eval` has more",
    "Attempted to load model": "for a checkpoint of this package use --model titan_loop",
}


def run(arguments: Sequence[str]) -> int:
    """Run the harness' command line."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import titan_loop.evaluation.harness_model  # noqa: F401  (registers the model)
        from titan_loop.evaluation.harness_tasks import one_line_without_data
    except ImportError as error:
        raise UserError(f"lm_eval is missing ({error}): pip install 'titan-loop[eval]'") from error
    argv = patch.object(sys, "argv", ["lm_eval", *arguments])
    try:
        with argv, one_line_without_data("lm_eval: a task"):
            cli_evaluate()
    except ValueError as error:  # also a `UserError`, which passes through
        for beginning, hint in _MISTAKES.items():
            if str(error).startswith(beginning):
                raise UserError(f"lm_eval: {error}; {hint}") from error
        raise
    return EXIT_OK
