"""Recipes that end a job as a run may end, at once: nothing here imports torch."""

import os
import signal
import sys
from pathlib import Path

from titan_loop.errors import NonFiniteError, StoppedError, UserError


def done_at_once():
    """End as a run that is complete."""
    sys.exit(0)


def interrupted_once():
    """End as an interrupted run does, and the second time as one that is done."""
    marker = Path(os.environ["TEST_MARKER"])
    if marker.exists():
        sys.exit(0)
    marker.touch()
    sys.exit(75)


def as_told():
    """End each rank as TEST_ENDINGS says: by an error with that code, or at 128 + N by signal N.

    Starts are separated by semicolons, ranks by spaces; "wait" waits for SIGTERM, and "save" leaves
    a checkpoint.
    """
    start, rank = int(os.environ["TITAN_LOOP_LOCAL_START"]), int(os.environ["RANK"])
    told = os.environ["TEST_ENDINGS"].split(";")[start - 1].split()[rank]
    if told == "wait":
        signal.pause()
    if told == "save":
        manifest = Path(sys.argv[-1], "checkpoints", "step-10", "manifest.json")
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    code = int(told) if told.isdigit() else 75
    errors = {1: RuntimeError, 2: UserError, 3: NonFiniteError, 75: StoppedError}
    if code in errors:
        raise errors[code]("as told")
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code > 128:
        signal.raise_signal(signal.Signals(code - 128))
    sys.exit(code)
