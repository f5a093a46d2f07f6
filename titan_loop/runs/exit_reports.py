"""The exit codes of a job's ranks; srun itself returns only the highest one.

A rank writes its code as it ends. A rank that a signal kills (an abort, the kernel's OOM killer)
writes nothing, so a missing report points to a signal.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titan_loop.errors import UserError
from titan_loop.launcher import current_task
from titan_loop.storage.json_files import read_json_object, write_json

REPORTS_VARIABLE = "TITAN_LOOP_EXIT_REPORTS"
"""Folder for the reports of one start of a job; unset outside a job."""


class RankExit(NamedTuple):
    """The end of a rank; `node` is empty if it is not known."""

    rank: int
    node: str
    code: int


def report_exit(code: int, environment: Mapping[str, str] = os.environ) -> None:
    """Write this rank's exit code, if it is a rank of a job; a failure is printed, not raised."""
    folder, task = environment.get(REPORTS_VARIABLE), current_task(environment)
    if folder is None or task is None:
        return
    try:
        write_json(Path(folder) / f"rank-{task.rank}.json", {"code": code, "node": task.node})
    except OSError as error:  # the code itself still reaches srun
        print(f"titan-loop: rank {task.rank} left no report: {error}", file=sys.stderr)


def read_exits(folder: Path) -> list[RankExit]:
    """Return the exits of the ranks that left a readable report, in the order of ranks."""
    exits: list[RankExit] = []
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, UserError, ValueError):
            report = read_json_object(path, fix="")
            code, rank = report.get("code"), int(path.stem.removeprefix("rank-"))
            if type(code) is int:
                exits.append(RankExit(rank, str(report.get("node", "")), code))
    return sorted(exits)


def describe_exits(exits: list[RankExit], ranks: int) -> str:
    """Return a phrase that counts the ranks by their exit code."""
    counts = Counter(each.code for each in exits)
    counted = [f"{count} with code {code}" for code, count in sorted(counts.items())]
    silent = [f"{ranks - len(exits)} without a report"] if len(exits) < ranks else []
    return f"of {ranks} ranks, {', '.join([*counted, *silent])}"
