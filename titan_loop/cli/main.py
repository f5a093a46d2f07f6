"""Entry point of `titan-loop`: finds the verb, and turns its errors into exit codes.

`titan_loop.errors` defines the codes. An unexpected exception keeps its traceback and ends with 1,
an interrupt ends with 130, and output that nobody reads any more (`| head`) with 141. An operating
system's error about a file is reported in one line. The code is 2 if the user can fix it, such as a
permission, and 1 if the machine is at fault, such as a full disk; ranks print a traceback, too.
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence

from titan_loop import __version__
from titan_loop.cli.arguments import HELP, command
from titan_loop.errors import (
    EXIT_CODES,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_OK,
    StoppedError,
    UserError,
    exit_code,
    nearest,
)
from titan_loop.launcher import slurm_job
from titan_loop.plugins import find, load, names, summary
from titan_loop.runs.exit_reports import report_exit

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

VERBS = {
    "train": "train a recipe: titan-loop train quickstart --total-tokens 200000",
    "data": "build, tokenise and inspect training data",
    "plan": "estimate memory, steps, communication and GPU-days of a recipe, without a GPU",
    "eval": "score checkpoints: held-out text, tasks, every depth and exit policy; watch a run",
    "lm_eval": "run lm-evaluation-harness' own command with the model titan_loop",
    "generate": "complete prompts or chat with a checkpoint in the terminal",
    "serve": "answer OpenAI's requests with a checkpoint, and show its steps on a page",
    "convert": "import and export models: Ouro, Hugging Face folders, GGUF files",
    "checkpoint": "list, verify, compare, name, delete and merge checkpoints",
    "slurm": "run a recipe's stages as a chain of SLURM jobs",
    "status": "show the progress of a recipe's stages and forks, and the next command",
    "upcycle": "duplicate a checkpoint's layers into the start of a deeper run",
    "plot": "draw a run's losses and exit distribution as PNG files",
    "report": "write one HTML page with everything about a run",
    "results": "record finished runs, and print a recipe's tables beside the paper's",
    "analyse": "trace answers over recurrent steps: lenses, exams, interventions",
    "scaling": "fit scaling laws in parameters, tokens and recurrent steps to runs or a table",
    "recipes": "list the recipes that `train` finds by name",
    "doctor": "check this machine, and suggest a fix for every problem",
}
_VIEWS = ("status", "upcycle", "plot", "report", "scaling", "recipes")
"""Verbs that are functions of `views.py`; the others have a module each."""

_USAGE = """usage: titan-loop VERB [ARGUMENTS]

titan_loop {version}: pretraining of looped language models

verbs:
{verbs}

For details: titan-loop VERB --help. On several processes:
  torchrun --nproc-per-node 4 -m titan_loop train RECIPE ..."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default the command line of this process; return the exit code."""
    code = EXIT_CRASH
    # Its bars would stand between lines of the log. It reads this when it is imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    _read_and_write_any_bytes()
    try:
        code = _run(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_CRASH
        raise
    finally:
        report_exit(code)
    return code


def _read_and_write_any_bytes() -> None:
    """Read and print bytes that are not UTF-8, such as in file names, without an exception."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # a broken pipe is still handled here
        return code
    except tuple(EXIT_CODES) as error:
        _trace_fault_of_the_machine(error)
        _report(str(error))
        return exit_code(error)
    except StoppedError as stop:
        if os.environ.get("RANK", "0") == "0":  # all ranks stop together; one reports it
            print(f"titan-loop: {stop}", file=sys.stderr)
        return exit_code(stop)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # or Python complains when it flushes at its exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if not isinstance(error.filename, (str, bytes)):
            raise
        _trace_fault_of_the_machine(error)
        _report(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return exit_code(error)
    except KeyboardInterrupt:
        print("titan-loop: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _trace_fault_of_the_machine(error: Exception) -> None:
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # RANK is set in a single process, too
    if (several or slurm_job()) and exit_code(error) == EXIT_CRASH:
        traceback.print_exception(error)


def _report(problem: str) -> None:
    # One rank alone may fail (a node without the data), so every rank reports its error.
    rank = os.environ.get("RANK", "0")
    which = "" if rank == "0" else f"rank {rank}: "
    print(f"titan-loop: error: {which}{problem}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    verb, *rest = arguments or ["--help"]
    if verb == "help":
        verb, *rest = [*rest, "--help"]
    if verb == "lm-eval":  # as the package is called; its own command is `lm_eval`
        verb = "lm_eval"
    if verb in HELP:
        verbs = VERBS | {name: summary("verbs", name) for name in names("verbs")}
        lines = "\n".join(f"  {name:10} {text}" for name, text in verbs.items())
        print(_USAGE.format(version=__version__, verbs=lines))
        return EXIT_OK
    if verb == "--version":
        print(f"titan_loop {__version__}")
        return EXIT_OK
    try:
        if verb in VERBS:
            module, name = ("views", verb) if verb in _VIEWS else (verb, "run")
            return load(f"titan_loop.cli.{module}:{name}")(rest)
        function = find("verbs", verb)
        if function is None:
            raise UserError(f"unknown verb {verb!r}{nearest(verb, [*VERBS, *names('verbs')])}")
        return command(verb)(function)(rest)
    except SystemExit as stop:  # tyro leaves this way after printing help
        if stop.code in (None, EXIT_OK):
            return EXIT_OK
        raise
