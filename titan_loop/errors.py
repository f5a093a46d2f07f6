"""A user's mistake in one line, and the exit codes of all commands.

A `UserError` names the field, its value and the fix. The command line prints it without a traceback
and ends with `EXIT_USER_ERROR`; the other errors of this file have codes of their own. Everything
else that escapes is a defect and keeps its traceback.
"""

import difflib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_NON_FINITE = 3  # max_skipped_steps non-finite steps in a row
EXIT_UNSTABLE = 4  # spikes went on after every rewind; see titan_loop/training/stability
EXIT_STOPPED = 75  # ended by a signal or the watchdog (EX_TEMPFAIL): start again to go on
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_MOST_KNOWN = 60  # names to list; lm-evaluation-harness has thousands of tasks


class UserError(ValueError):
    """A mistake of the user: one line that names the field, the value and the fix."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that cannot work; a check yields them, a command raises the first or prints all.

    `problem` names field and value; `fix` is empty if `problem` contains it.
    """

    field: str
    problem: str
    fix: str = ""

    @classmethod
    def of(cls, field: str, value: object, problem: str, fix: str = "") -> "Refusal":
        """Return the refusal of a value; `problem` continues a sentence that begins with it."""
        return cls(field, f"{field}={value} {problem}", fix)

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}" if self.fix else self.problem


def raise_first(refusals: Iterable[Refusal]) -> None:
    """Raise the first refusal, if there is one, as a `UserError`."""
    for refusal in refusals:
        raise UserError(str(refusal))


def caught(field: str, check: Callable[[], object]) -> Iterator[Refusal]:
    """Turn a check's `UserError` into the refusal of a field."""
    try:
        check()
    except UserError as error:
        yield Refusal(field, str(error))


class RunFailedError(RuntimeError):
    """A run ended for a reason outside of it, such as a full disk; ends with `EXIT_CRASH`."""


class NonFiniteError(RuntimeError):
    """Training stopped because loss or gradients stayed non-finite; ends with `EXIT_NON_FINITE`."""


class UnstableError(RuntimeError):
    """Training stopped because spikes went on after every rewind; ends with `EXIT_UNSTABLE`."""


class StoppedError(RuntimeError):
    """A signal asked the run to stop, and it did at a step boundary; ends with `EXIT_STOPPED`."""


class DataEndedError(StoppedError):
    """A rank has no data for the next step, so all stop before it; ends with `EXIT_USER_ERROR`."""


EXIT_CODES: dict[type[Exception], int] = {
    UserError: EXIT_USER_ERROR,
    RunFailedError: EXIT_CRASH,
    NonFiniteError: EXIT_NON_FINITE,
    UnstableError: EXIT_UNSTABLE,
}
"""Exit code of every error that is reported in one line."""

USER_ERRNOS = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.ENXIO,
    errno.EPERM,
}
"""Faults of files that the user can remedy. The others are the machine's and may pass: a shared
file system may lose files (ENOENT) or turn read-only (EROFS) for a while."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends."""
    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)):
        return EXIT_USER_ERROR if error.errno in USER_ERRNOS else EXIT_CRASH
    if isinstance(error, DataEndedError):
        return EXIT_USER_ERROR
    if isinstance(error, StoppedError):
        return EXIT_STOPPED
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), EXIT_CRASH)


def require_at_least(least: float, **values: float | None) -> None:
    """Raise `UserError` for the first value that is below `least`; None takes a default."""
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def require_known(name: str, value: str, known: Iterable[str]) -> None:
    """Raise `UserError` for a value outside of `known`."""
    if value not in (known := tuple(known)):
        raise UserError(f"{name}={value} is unknown{nearest(value, known)}")


def seen_from(path: str | os.PathLike[str]) -> str:
    """Return " (in FOLDER)", where a relative path starts; empty for an absolute one."""
    return "" if os.path.isabs(path) else f" (in {os.getcwd()})"


def runs_in(folder: str | os.PathLike[str], otherwise: str) -> str:
    """Return "give one of A, B in it", the runs in a folder such as a recipe's, or `otherwise`."""
    names = sorted(path.parent.name for path in Path(folder).glob("*/run.json"))
    return f"give one of {', '.join(names)} in it" if names else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, or the error's name if it is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def listed(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, separated by commas, and "…" if there are more."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return "; nearest: a, b" with at most three candidates, or "; known: …" with the first."""
    known = sorted(set(candidates))
    if close := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"; nearest: {', '.join(close)}"
    return f"; known: {listed(known, _MOST_KNOWN)}" if known else ""
