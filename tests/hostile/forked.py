"""Runs one command in a forked child under limits of time and memory, and says how it ended.

The parent has imported the package, so a case costs a fork instead of seconds of imports. It must
have no threads: what a child needs of torch or a process group, the child starts.
"""

import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 100.0
MOST_BYTES = 1_500_000_000
"""Resident memory of a child beyond its parent's."""

_LOOK_SECONDS = 0.02
_TRACED = 70
"""Exit code of a child that an exception left, which `titan-loop` never has."""

_TRACEBACK = re.compile(r'^Traceback \(most recent call last\):\n  File "', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended: its exit code (negative for a signal), and why it was killed here."""

    code: int
    output: str
    seconds: float
    killed: str = ""

    @property
    def fault(self) -> str:
        """What must not happen; empty if all is well."""
        if self.killed:
            return self.killed
        if self.code < 0:
            return f"died of {signal.Signals(-self.code).name}"
        if self.code == _TRACED or _TRACEBACK.search(self.output):
            last = self.output.strip().splitlines() or ["?"]
            return f"traceback: {last[-1]:.200}"
        if self.code == 2 and self.output.count("titan-loop: error:") != 1:
            return "code 2 without one line"
        return ""


def run_forked(act: Callable[[], int], log: Path, *, most_seconds: float = MOST_SECONDS) -> Ending:
    """Call `act`, which returns an exit code, in a child that writes to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(act, log)
    killed, own = "", _resident_bytes(os.getpid())
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - began > most_seconds:
            killed = f"still running after {most_seconds:.0f} s"
        elif _resident_bytes(child) - own > MOST_BYTES:
            killed = f"took more than {MOST_BYTES / 1e9} GB"
        if killed:
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(_LOOK_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # processes that it left behind
    output = log.read_text(encoding="utf-8", errors="replace")
    return Ending(os.waitstatus_to_exitcode(status), output, time.monotonic() - began, killed)


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
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * resource.getpagesize()
