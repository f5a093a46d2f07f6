"""One row of a table: a Python command on one or several ranks, under a time limit.

On GPUs a row is a process of its own, or torchrun's, so that it shares no memory and no compiled
code with the row before it and an error ends it alone. On a CPU, where importing torchtitan would
take most of the time, its ranks are forked from a server that has imported it. The path through
torchrun has not been run on a GPU yet.
"""

import json
import os
import re
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support.multiprocess import free_port, preloaded_context

Numbers = dict[str, Any]
"""Columns of one line of a table."""

FOLDER = "FOLDER"
"""Word of a command that stands for the row's own folder."""

GRACE_SECONDS = 40.0
"""Time from a row's limit to its end: torchrun gives hung ranks 30 seconds."""
FORKED_GRACE_SECONDS = 10.0  # for other ranks, once one has failed
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*|titan-loop: error.*|.*\bMISSED\b.*")
_PREFIX = re.compile(r"^\[rank\d+\]:\s*")
_LONGEST_ERROR = 300


@dataclass(frozen=True, kw_only=True)
class Row:
    """A command, and the reader of its numbers.

    Attributes:
        name: Name in the table.
        words: Arguments of Python: `-m MODULE ...` or `SCRIPT ...`; `FOLDER` among them is
            replaced.
        read: (log, folder) → lines of the table; `folder` is the row's own.
        ranks: Number of processes.
        absent: Reason for which the row cannot run here; empty if it can.
        environment: Variables of its processes.
    """

    name: str
    words: Sequence[str]
    read: Callable[[Path, Path], list[Numbers]]
    ranks: int = 1
    absent: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def with_environment(self, variables: Mapping[str, str]) -> "Row":
        """Return the row with these variables under its own."""
        return replace(self, environment={**variables, **self.environment})

    @property
    def command(self) -> str:
        """The command line that a person can type."""
        program = ["python"] if self.ranks == 1 else ["torchrun", f"--nproc-per-node={self.ranks}"]
        return shlex.join([*program, *self.words])


def run_row(row: Row, *, folder: Path, log: Path, seconds: float, forked: bool) -> list[Numbers]:
    """Run a row and return its lines; a failure is a line with `error`, after those it left.

    Args:
        row: The row; its `absent` is empty.
        folder: A folder of its own, which exists.
        log: File for the output of its processes.
        seconds: Time after which it is stopped.
        forked: Whether ranks are forked, as on a CPU.
    """
    start = _forked if forked else _as_command
    words = [str(folder) if word == FOLDER else word for word in row.words]
    log.write_bytes(b"")
    began = time.monotonic()
    code = start(replace(row, words=words), log, seconds)
    error = ""
    if code is None:
        error = f"stopped after {time.monotonic() - began:.0f} s, the limit of its table"
    elif code != 0:
        error = last_error(log.read_text(errors="replace")) or f"exit code {code}"
    lines: list[Numbers] = []
    try:
        lines = row.read(log, folder)
    except Exception as fault:  # whatever a failed process has left is a result
        error = error or f"no numbers in its output: {type(fault).__name__}: {fault}"
    if error:
        lines.append({"error": error})
    return [{"row": row.name, **line} for line in lines]


def last_error(output: str) -> str:
    """Return the last line of an output that names an error, else its last line."""
    lines = [_PREFIX.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    # torchrun's own report, which follows the ranks', ends in a rule.
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return [*lines[-1:], *errors][-1][:_LONGEST_ERROR] if lines else ""


def _as_command(row: Row, log: Path, seconds: float) -> int | None:
    """Return the exit code; None after `seconds`."""
    words = [sys.executable, *row.words]
    if row.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
        words = [sys.executable, *launcher, *row.words]
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=os.environ | row.environment,
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()  # torchrun's ranks lead groups of their own, and it ends them
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        _end_group(process.pid)
        process.wait()


def _forked(row: Row, log: Path, seconds: float) -> int | None:
    """Return the first exit code that is not 0, or 0; None after `seconds`."""
    context = preloaded_context()
    shared = {**os.environ, **row.environment, "OMP_NUM_THREADS": "1"}
    if row.ranks > 1:
        world = {"WORLD_SIZE": str(row.ranks), "LOCAL_WORLD_SIZE": str(row.ranks)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= world | meeting | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(row.ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if row.ranks > 1 else {}
        arguments = ([*row.words], shared | own, str(log))
        processes.append(context.Process(target=_act_as_python, args=arguments))
        processes[-1].start()
    deadline = time.monotonic() + seconds
    waiting = {process.sentinel: process for process in processes}
    try:
        while waiting and (left := deadline - time.monotonic()) > 0:
            for sentinel in wait([*waiting], left):
                ended = waiting.pop(sentinel)  # pyright: ignore[reportArgumentType]
                ended.join()
                if ended.exitcode:
                    deadline = min(deadline, time.monotonic() + FORKED_GRACE_SECONDS)
        codes = [process.exitcode for process in processes if process.exitcode]
        return codes[0] if codes else None if waiting else 0
    finally:
        for process in waiting.values():
            assert process.pid is not None
            _end_group(process.pid)
            process.kill()  # it may not lead a group yet
            process.join()


def _act_as_python(words: list[str], variables: dict[str, str], log: str) -> None:
    """Run `python WORDS` with these variables in this process, which was forked for it."""
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.environ.clear()
    os.environ.update(variables)
    if "RANK" not in variables:
        sys.modules["titan_loop.compat"].skip_final_pause()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _end_group(group: int) -> None:
    """Kill a process that leads its group, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_numbers(_: Path, folder: Path) -> list[Numbers]:
    """Return the numbers of `titan-loop train` in its run directory, the one in `folder`.

    Records cover the steps since the record before; the first ones, which compile, are left out.
    """
    (metrics,) = folder.glob("*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    late = records[len(records) // 2 :]
    rates = [record["tokens_per_second"] for record in late]
    shares = [record["mfu"] for record in late if record["mfu"] is not None]
    rate = statistics.median(rates)
    return [
        {
            "tokens/s": rate,
            "least": min(rates),
            "most": max(rates),
            "MFU": statistics.median(shares) if shares else None,
            "peak GiB": max(record["peak_memory_bytes"] for record in records) / 2**30,
            "step s": late[-1]["global_batch_tokens"] / rate,
            "first step s": records[0]["global_batch_tokens"] / records[0]["tokens_per_second"],
            "loss": records[-1]["loss"],
        }
    ]


def printed_lines(log: Path, _: Path) -> list[Numbers]:
    """Return the lines of the first table that a benchmark prints: cells between bars."""
    rows = [line.split(" | ") for line in log.read_text(errors="replace").splitlines()]
    headers = [at for at, cells in enumerate(rows) if len(cells) > 2]
    names = [cell.strip() for cell in rows[headers[0]]]
    lines = []
    for cells in rows[headers[0] + 1 :]:
        if len(cells) == len(names):  # warnings may stand between
            lines.append(dict(zip(names, (cell.strip() for cell in cells), strict=True)))
    return lines


def printed_measurements(log: Path, _: Path) -> list[Numbers]:
    """Return the indented lines of `inference.py`: a measurement and its result."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line[:2] == "  "]
    parted = [re.split(r": |  +| (?=prefill \d)", line.strip(), maxsplit=1) for line in lines]
    return [{"measured": name, "result": result} for name, result in parted]


def planned_and_measured(log: Path, _: Path, *, measured: Path, row: str) -> list[Numbers]:
    """Return the peak that `titan-loop plan` prints beside the one of a row that has run.

    Args:
        measured: Record of the row's table, `TABLE.json`.
        row: Name of the row.
    """
    found = re.search(r"^GiB of a GPU, peak +([\d.,]+)", log.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("titan-loop plan printed no peak")
    planned = float(found[1].replace(",", ""))
    lines = json.loads(measured.read_text())["rows"] if measured.exists() else []
    peak = next((line.get("peak GiB") for line in lines if line["row"] == row), None)
    ratio = peak / planned if peak and planned else None
    return [{"planned GiB": planned, "measured GiB": peak, "measured over planned": ratio}]
