"""The SLURM jobs of a preparation, noted as they are submitted, so that none is submitted twice.

A second submission would rewrite the list of tasks that the first one's jobs read.
"""

import shutil
import subprocess
from pathlib import Path

from titan_loop.errors import UserError

JOBS_NAME = "slurm_jobs.txt"


def note_job(jobs: Path, position: int, answer: str) -> str:
    """Append a job's number, the word at `position` of sbatch's answer, to a file; return it."""
    job = answer.split()[position]
    with jobs.open("a", encoding="utf-8") as file:
        file.write(f"{job}\n")
    return job


def refuse_submitted(jobs: Path) -> None:
    """Refuse to go on while a job noted in the file is queued or runs; forget jobs that are gone.

    Raises:
        UserError: A job is still there, or SLURM cannot be asked.
    """
    if not jobs.exists():
        return
    noted = dict.fromkeys(jobs.read_text(encoding="utf-8").split())
    source = jobs.parents[1]
    problem = f"output {source} was submitted to SLURM as jobs {', '.join(noted)}"
    if shutil.which("squeue") is None:
        fix = f"give the command where squeue is on the PATH, or delete {jobs} if they are gone"
        raise UserError(f"{problem}, which may still run: {fix}")
    # Not `--jobs`: it fails on the number of a job that SLURM has forgotten.
    asked = subprocess.run(
        ["squeue", "--noheader", "--format=%F"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise UserError(f"{problem}, and squeue failed ({asked.stderr.strip()}): try again later")
    queued = set(asked.stdout.split())
    if left := [job for job in noted if job in queued]:
        fix = f"wait for them, or end them with scancel {' '.join(left)}"
        raise UserError(f"output {source} is being prepared by SLURM jobs {', '.join(left)}: {fix}")
    jobs.unlink()
