"""`titan-loop lm_eval …`: lm-evaluation-harness' own command with the model `titan_loop` in it.

The harness finds models in a table of its own and offers no plugin mechanism (0.4.13): a plain
`lm_eval` never imports this package, so it cannot know the model. This verb registers it and hands
over; every flag is the harness'.
"""

import sys
from collections.abc import Sequence

from titan_loop.errors import EXIT_OK, UserError

_MISTAKES = {
    "Tasks not found": "`titan-loop lm_eval ls tasks` lists what there is, `titan-loop eval` has "
    "tasks of its own besides",
    "Attempted to load model": "a checkpoint of this package is --model titan_loop",
}
"""Beginning of a harness message about a user's mistake → hint."""


def run(arguments: Sequence[str]) -> int:
    """Run the harness' command line."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import titan_loop.evaluation.harness_model  # noqa: F401  (registers the model)
        from titan_loop.evaluation.harness_tasks import hub_offline_if_unreachable
    except ImportError as error:
        raise UserError(f"lm_eval is missing ({error}): pip install 'titan-loop[eval]'") from error
    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        with hub_offline_if_unreachable("lm_eval: a task"):
            cli_evaluate()
    except UserError:
        raise
    except ValueError as error:
        for beginning, hint in _MISTAKES.items():
            if str(error).startswith(beginning):
                raise UserError(f"lm_eval: {error}; {hint}") from error
        raise
    finally:
        sys.argv = before
    return EXIT_OK
