"""Runs one command in a forked child under limits of time and memory, and says how it ended.

The parent has imported the package, so a case costs a fork instead of seconds of imports. It must
have no threads: what a child needs of torch or a process group, the child starts.
"""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import titan_loop.compat as compat  # before any torchtitan module

MOST_SECONDS = 100.0
MOST_BYTES = 1_500_000_000
"""Resident memory of a child beyond its parent's."""

_TRACED = 70
"""Exit code of a child that an exception left, which `titan-loop` never has."""


def run_forked(act: Callable[[], int], log: Path) -> tuple[str, int, str]:
    """Call `act` in a child; return what went wrong or "", its exit code, and what it wrote."""
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(act, log)
    fault, own, done, status = "", _resident_bytes(os.getpid()), 0, 0
    while not done and not fault:
        time.sleep(0.02)
        if time.monotonic() - began > MOST_SECONDS:
            fault = f"still running after {MOST_SECONDS:.0f} s"
        elif _resident_bytes(child) - own > MOST_BYTES:
            fault = f"took more than {MOST_BYTES / 1e9} GB"
        done, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # and processes that it left behind
    if not done:
        _, status = os.waitpid(child, 0)
    code, output = os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
    if code < 0:
        fault = fault or f"died of {signal.Signals(-code).name}"
    elif code == _TRACED or '\nTraceback (most recent call last):\n  File "' in f"\n{output}":
        fault = "traceback"
    elif code == 2 and output.count("titan-loop: error:") != 1:
        fault = "code 2 without one line"
    return fault, code, output


def _be_child(act: Callable[[], int], log: Path) -> None:
    code = _TRACED
    try:
        os.setsid()
        streams = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(streams, 1)
        os.dup2(streams, 2)
        # They replace pytest's streams, which would keep the output.
        sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        compat.skip_final_pause()
        code = act()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _resident_bytes(process: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0
