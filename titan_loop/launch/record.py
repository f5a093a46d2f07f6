"""The files that the jobs of a recipe leave in `FOLDER/slurm/`.

STAGE.sbatch   the script that was submitted
STAGE.log      output of all starts of the stage's job
jobs.json      stage → job of the latest submission
STAGE.json     number of restarts without a new checkpoint, and the bad nodes
check-JOB-K/   reports of the node check before start K
exit-JOB-K/    exit code of every rank that ended start K by itself
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_loop.checkpoint.folders import committed_steps
from titan_loop.errors import UserError
from titan_loop.launch.scheduler import JobStatus, Scheduler
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_versioned_json, write_json

FORMAT_VERSION = 1


def records_folder(folder: Path) -> Path:
    """Return the folder for the files of a recipe's jobs."""
    return folder / "slurm"


def read_jobs(folder: Path) -> dict[str, str]:
    """Return stage → job number, in the order of submission; `UserError` if there is none."""
    path = records_folder(folder) / "jobs.json"
    try:
        return dict(_read(path)["jobs"])
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no jobs; give the folder of a recipe that slurm submit was called for"
        ) from error


def write_jobs(folder: Path, jobs: Mapping[str, str]) -> None:
    """Record stage → job number."""
    record = {"format_version": FORMAT_VERSION, "jobs": dict(jobs)}
    write_json(records_folder(folder) / "jobs.json", record)


def read_chain(folder: Path, scheduler: Scheduler) -> list[tuple[str, JobStatus]]:
    """Return stage and job in the order of submission; `UserError` if there are none."""
    return [(stage, scheduler.state(job)) for stage, job in read_jobs(folder).items()]


@dataclass(slots=True)
class Restarts:
    """The history of one job's starts.

    Attributes:
        fruitless: Number of restarts in a row that found no checkpoint since the start before.
        checkpoints: Run → newest step with a checkpoint at the job's latest start.
        bad_nodes: Node → its fault.
    """

    fruitless: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)
    bad_nodes: dict[str, str] = field(default_factory=dict)

    def begin(self, checkpoints: Mapping[str, int], *, is_restart: bool) -> None:
        """Count a start; it is a restart if the job has run before."""
        if not is_restart:
            self.bad_nodes = {}
        progress = not is_restart or is_newer(checkpoints, self.checkpoints)
        self.fruitless = 0 if progress else self.fruitless + 1
        self.checkpoints = dict(checkpoints)


def is_newer(now: Mapping[str, int], before: Mapping[str, int]) -> bool:
    """Return whether some run has a newer checkpoint than before."""
    return any(step > before.get(run, -1) for run, step in now.items())


def newest_checkpoints(folder: Path, stage: str | None) -> dict[str, int]:
    """Return run → newest step with a manifest, for the recipe's folder or one stage of it."""
    runs = [folder, *(folder.glob("*") if stage is None else [folder / stage])]
    steps = {
        run.name: committed_steps(RunDirectory(run).checkpoints) for run in runs if run.is_dir()
    }
    return {name: found[-1] for name, found in steps.items() if found}


def read_restarts(folder: Path, name: str) -> Restarts:
    """Return the history of the job called `name`; an empty one before its first start."""
    try:
        record = _read(records_folder(folder) / f"{name}.json")
    except FileNotFoundError:
        return Restarts()
    del record["format_version"]
    return Restarts(**record)


def write_restarts(folder: Path, name: str, restarts: Restarts) -> None:
    """Write the history of a job's starts."""
    record = {"format_version": FORMAT_VERSION, **asdict(restarts)}
    write_json(records_folder(folder) / f"{name}.json", record)


def _read(path: Path) -> dict[str, Any]:
    return read_versioned_json(path, format_version=FORMAT_VERSION, fix="move it away")
