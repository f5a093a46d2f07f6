"""Another process that holds a run directory, as a job that trains it does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDS = """
import sys
from titan_loop.runs.run_directory import RunDirectory
lock = RunDirectory(sys.argv[1]).lock()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(run: Path) -> Iterator["subprocess.Popen[str]"]:
    """Yield the process that holds a run until the block ends."""
    words, pipe = [sys.executable, "-c", _HOLDS, str(run)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
