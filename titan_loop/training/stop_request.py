"""A signal asks a run to stop: it saves at a step boundary, or ends in time without saving.

    SIGUSR1 (time limit), SIGTERM (preemption, cancellation), Ctrl-C ─► StopListener
        trainer, a step later at most ─► do all go on? ─► no: save, `StoppedError`, EXIT_STOPPED
        a second signal, or no boundary within the grace time ─┐
        no sign of progress for `hang_seconds` ────────────────┴► stacks, traces, EXIT_STOPPED
    an error of this rank alone ─► `leave`: `LEAVE_SECONDS` to close files
        ─► stacks, this rank's traceback last, the error's exit code

Ctrl-C waits for a boundary without a time limit; a second one ends the process at once, and so does
the first before the first step. The signal handler writes into a pipe that a thread reads, so a
rank inside a collective hears the signal, too. Nothing here imports torch, so a process can listen
before that slow import.
"""

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType

from titan_loop.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError, exit_code
from titan_loop.runs.exit_reports import report_exit

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
GRACE_VARIABLE = "TITAN_LOOP_GRACE_SECONDS"
"""Seconds from the first signal to the end of a rank that has not stopped by itself."""

GRACE_SECONDS = 240.0
ECHO_SECONDS = 5.0
"""Signals this soon after the first are the same request: a cancelled job's tasks get SIGTERM once
from their node and once through srun."""

LEAVE_SECONDS = 15.0
"""Time that a rank has to close its files after an error of its own. Closing may wait in a
collective for other ranks, which wait for this one until the launcher ends them."""

_POLL_SECONDS = 3600.0
"""The longest wait for a signal at a time; `poll` takes 24 days at most."""

_DUMP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_CLOSE = 0


def grace_seconds(environment: Mapping[str, str]) -> float:
    """Return the value of `GRACE_VARIABLE`, a positive number, or the default."""
    text = environment.get(GRACE_VARIABLE, str(GRACE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{GRACE_VARIABLE}={text} must be a number of seconds above 0")
    return seconds


class StopListener:
    """Listens for `SIGNALS` inside its context; enter it in the main thread.

    All arguments are in seconds: `grace` from the first signal to the end of the process, `echo`
    during which further signals count as the first, `leave` from `leave()` to the process's end.
    """

    def __init__(
        self,
        *,
        grace: float = GRACE_SECONDS,
        echo: float = ECHO_SECONDS,
        leave: float = LEAVE_SECONDS,
    ) -> None:
        self._grace, self._echo, self._leave = grace, echo, leave
        self._leaving: tuple[BaseException, float] | None = None
        self._heard: tuple[signal.Signals, float] | None = None
        self._hang_seconds = 0.0
        self._trains = False
        self._progress = time.monotonic()
        self._dump: Callable[[], object] = lambda: None
        self._reader = self._writer = -1
        self._thread: threading.Thread | None = None
        self._handlers: dict[signal.Signals, object] = {}
        self._wakeup = -1

    @property
    def requested_by(self) -> str | None:
        """Name of the signal that asked this rank to stop; None if there was none."""
        return None if self._heard is None else self._heard[0].name

    def watch(self, hang_seconds: float, dump: Callable[[], object]) -> None:
        """Call `dump` and end this process if `hang_seconds` (0: never) pass without `progress`."""
        self._trains, self._hang_seconds, self._dump = True, hang_seconds, dump
        self.progress()
        self._wake()

    def unwatch(self) -> None:
        """Stop watching for progress; signals are still heard."""
        self._trains, self._hang_seconds, self._dump = False, 0.0, lambda: None
        self._wake()

    def leave(self, error: BaseException) -> None:
        """End this process soon with the exit code of `error`, even if it waits in a collective."""
        self._leaving = error, time.monotonic()
        self._wake()

    def progress(self) -> None:
        """Report progress."""
        self._progress = time.monotonic()

    def __enter__(self) -> "StopListener":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                continue  # a shell's background job ignores Ctrl-C
            self._handlers[number] = signal.signal(number, self._leave_it_to_the_thread)
        _hear_the_end_of_torchrun()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        signal.set_wakeup_fd(self._wakeup)
        if self._leaving is not None:
            return  # keep watching: exiting joins threads, which may wait for other ranks
        assert self._thread is not None
        os.write(self._writer, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)
        self._writer = -1

    def _wake(self) -> None:
        if self._writer >= 0:
            os.write(self._writer, bytes([signal.SIGCONT]))

    def _listen(self) -> None:
        poller = select.poll()  # `select` refuses descriptors above 1,023
        poller.register(self._reader, select.POLLIN)
        while True:
            left = self._deadline()[0] - time.monotonic()
            if not poller.poll(1000 * min(max(left, 0.0), _POLL_SECONDS)):
                deadline, reason = self._deadline()  # a step may have ended since the wait began
                if deadline <= time.monotonic():
                    self._give_up(reason)
                continue
            for number in os.read(self._reader, 64):
                if number == _CLOSE:
                    return
                if number in SIGNALS:
                    self._hear(signal.Signals(number))

    def _deadline(self) -> tuple[float, str]:
        """Return the time at which this process ends unless something happens, and the reason."""
        limits = [(float("inf"), "")]
        if self._heard is not None and self._heard[0] != signal.SIGINT:
            name, when = self._heard
            reason = f"{self._grace:g} s after {name.name} it has not stopped"
            limits.append((when + self._grace, reason))
        if self._hang_seconds > 0:
            reason = f"no progress for {self._hang_seconds:g} s (hang_seconds)"
            limits.append((self._progress + self._hang_seconds, reason))
        if self._leaving is not None:
            error, when = self._leaving
            reason = f"{self._leave:g} s after {type(error).__name__} it has not ended"
            limits.append((when + self._leave, reason))
        return min(limits)

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and not self._trains:
            return  # the main thread raises KeyboardInterrupt
        if number == signal.SIGINT and self._heard is not None:
            report_exit(EXIT_INTERRUPTED)
            os._exit(EXIT_INTERRUPTED)
        if self._heard is None:
            self._heard = number, now
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                _say("saving after this step; a second Ctrl-C leaves at once")
        elif now - self._heard[1] > self._echo:
            self._give_up(f"a second signal, {number.name}")

    def _leave_it_to_the_thread(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self._trains:
            raise KeyboardInterrupt

    def _give_up(self, reason: str) -> None:
        """Print every thread's stack to stderr and end this process without a save."""
        rank = os.environ.get("RANK", "0")
        _say(f"error: rank {rank}: {reason}; ended without a new checkpoint")
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        error = None if self._leaving is None else self._leaving[0]
        code = EXIT_STOPPED if error is None else exit_code(error)
        # The disk may hang, too, and the dump may need a lock that a hanging thread holds.
        for last in (lambda: report_exit(code), self._dump):
            thread = threading.Thread(target=last, daemon=True)
            thread.start()
            thread.join(_DUMP_SECONDS)
        if error is not None:
            traceback.print_exception(error)
            sys.stderr.flush()
        os._exit(code)


def _say(text: str) -> None:
    print(f"titan-loop: {text}", file=sys.stderr, flush=True)


def _hear_the_end_of_torchrun() -> None:
    """Have Linux send SIGTERM if torchrun is killed; else its ranks train on and hold the lock."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
