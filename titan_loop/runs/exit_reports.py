"""The exit code of every rank of a job, which srun's own code, the highest of them, hides.

A rank writes its code as it ends. One that a signal ends (an abort, the kernel's memory killer)
writes nothing, so a missing report says so.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.json_files import read_json_object, write_json

REPORTS_VARIABLE = "TITAN_LOOP_EXIT_REPORTS"
"""Folder for the reports of one start of a job; unset outside a job."""


def report_exit(code: int, environment: Mapping[str, str] = os.environ) -> None:
    """Write this rank's exit code, if it is a rank of a job; a failure is printed, not raised."""
    folder, rank = environment.get(REPORTS_VARIABLE), environment.get("SLURM_PROCID")
    if folder is None or rank is None:
        return
    try:
        write_json(Path(folder) / f"rank-{rank}.json", {"code": code})
    except OSError as error:  # the code itself still reaches srun
        print(f"titan-loop: rank {rank} left no report: {error}", file=sys.stderr)


def read_exits(folder: Path) -> list[int]:
    """Return the exit codes of the ranks that left a report that can be read."""
    codes: list[int] = []
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, UserError):
            code = read_json_object(path, fix="").get("code")
            codes += [code] if type(code) is int else []
    return codes


def describe_exits(codes: list[int], ranks: int) -> str:
    """Return how many ranks ended with which code.

    Args:
        codes: From `read_exits`.
        ranks: Number of ranks of the job.
    """
    counted = [f"{count} with code {code}" for code, count in sorted(Counter(codes).items())]
    silent = [f"{ranks - len(codes)} without a report"] if len(codes) < ranks else []
    return f"of {ranks} ranks, {', '.join([*counted, *silent])}"
