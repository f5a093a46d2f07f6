"""The files of a run: their names and formats, in one place.

Format version 1:

    run.json         format version, when and how the run was created, versions and commit, restarts
    config.json      the fully resolved configuration of the latest start
    log.txt          rank 0's log, all starts one after another
    metrics.jsonl    one record per logged step (keys: `titan_loop.training.metrics`)
    decisions.jsonl  every skipped spike and rewind (`--stability.skip-spikes`)
    rewinds.json     where rewinds went, and the windows that they jump over
    evals.jsonl      one line per evaluation: while training, or by `titan-loop eval watch`
    run.lock         held by rank 0 of the job that trains here
    wandb/run_id     the id under which every start logs to W&B, when enabled
    checkpoints/step-N/   tb/   wandb/   plots/   evals/
    compile_cache/   compiled code, for the next start; beside the stages of a recipe
    profiling/{traces,memory_snapshot}/   comm_traces/      torchtitan's, when enabled

A run that is killed may leave half a line at the end of a `.jsonl` file, which readers skip. A run
that restarts from a checkpoint appends again: records of the steps it repeats supersede the older
ones when read.
"""

import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any

import titan_loop
from titan_loop.checkpoint.folders import CHECKPOINTS, step_folder
from titan_loop.errors import UserError, runs_in, seen_from
from titan_loop.storage.folder_lock import FolderLock
from titan_loop.storage.json_files import (
    read_json_object,
    read_jsonl,
    read_versioned_json,
    write_json,
)
from titan_loop.storage.transient import retried, unwritable

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
COMPILE_CACHE = "compile_cache"
LOCK = "run.lock"
REPAIR = "repair it, or move it away and start the run once more to write it"


class RunDirectory:
    """The paths of a run and its small text files; nothing is touched until one is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.run_json = self.path / "run.json"
        self.config_json = self.path / "config.json"
        self.metrics_jsonl = self.path / "metrics.jsonl"
        self.decisions_jsonl = self.path / "decisions.jsonl"
        self.log_txt = self.path / "log.txt"
        self.evals_jsonl = self.path / "evals.jsonl"
        self.checkpoints = self.path / CHECKPOINTS
        self.wandb_run_id = self.path / "wandb" / "run_id"
        self.plots = self.path / "plots"
        self.evaluations = self.path / "evals"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` training steps."""
        return step_folder(self.checkpoints, step)

    def create_or_open(
        self, command: Sequence[str], config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Create the folder, or join an existing run, and return the new content of `run.json`.

        Call it on rank 0 only, before anything else writes; `config` becomes `config.json`.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        start = {
            "command": list(command),
            "working_directory": os.getcwd(),
            "versions": library_versions(),
            "commit": source_commit(),
        }
        try:
            retried(lambda: self.path.mkdir(parents=True, exist_ok=True))
            if self.run_json.exists():
                record = self.read_run()
                record.setdefault("restarts", []).append({"started": now, **start})
            else:
                record = {"format_version": FORMAT_VERSION, "created": now, **start, "restarts": []}
            if config is not None:
                write_json(self.config_json, config)
            # Last: a folder with a run.json counts as a run, whose config.json readers expect.
            write_json(self.run_json, record)
        except OSError as error:
            raise unwritable(f"run directory {str(self.path)!r}", error) from error
        return record

    def lock(self) -> FolderLock:
        """Keep other jobs from training here; create the folder if it is missing."""
        return FolderLock(self.path, LOCK, called=f"dump_folder={self.path}", user="run")

    def read_run(self) -> dict[str, Any]:
        """Return the content of `run.json`, of this format version or an older one."""
        try:
            return read_versioned_json(
                self.run_json, format_version=FORMAT_VERSION, fix="choose another run directory"
            )
        except FileNotFoundError as error:
            raise UserError(
                f"{str(self.path)!r} is not a run directory{seen_from(self.path)}: it has no "
                f"run.json; {runs_in(self.path, 'give the folder of a run')}"
            ) from error

    @property
    def working_directory(self) -> Path | None:
        """Folder that the last start's relative paths refer to; None if it was not recorded."""
        if not self.run_json.exists():
            return None
        run = self.read_run()
        start = [run, *run.get("restarts", [])][-1]
        return Path(start["working_directory"]) if "working_directory" in start else None

    def read_config(self) -> dict[str, Any]:
        """Return the content of `config.json`; `UserError` if it is missing."""
        try:
            return read_json_object(self.config_json, fix=REPAIR)
        except FileNotFoundError as error:
            raise UserError(
                f"{str(self.path)!r} has no config.json; start the run once more to write it"
            ) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return one consistent series of training records, in the order of steps.

        A record whose step is not larger than the one before it comes from a restart; it supersedes
        every earlier record of its step or later, so the series never mixes two attempts.
        """
        records = read_jsonl(self.metrics_jsonl, {"step": int, "tokens": int})
        return _one_series(records, itemgetter("step"))

    def read_decisions(self) -> list[dict[str, Any]]:
        """Return the decisions about spikes, without those that a restart superseded."""

        def place(record: Mapping[str, Any]) -> tuple[int, int, bool]:
            return record["rewound"], record["step"], record["decision"] != "skip"

        fields = {"decision": str, "step": int, "rewound": int, "windows": list}
        return _one_series(read_jsonl(self.decisions_jsonl, fields), place)


def _one_series(
    records: Iterable[dict[str, Any]], place: Callable[[dict[str, Any]], Any]
) -> list[dict[str, Any]]:
    series: list[dict[str, Any]] = []
    for record in records:
        while series and place(series[-1]) >= place(record):
            series.pop()
        series.append(record)
    return series


def source_commit() -> str | None:
    """Return the commit of this code's checkout, with "-dirty" if its code was changed."""
    # Results and documents change between runs, but affect no number of the next one.
    outputs = ":!train_configs/*/results/*", ":!train_configs/*/plots/*", ":!*.md"
    changed = _git("diff", "--name-only", "HEAD", "--", ".", *outputs)
    commit = _git("describe", "--always", "--exclude=*")
    return commit and commit + "-dirty" * bool(changed)


def is_clean(commit: str | None) -> bool:
    """Return whether a `source_commit` is not dirty and in the history of this checkout."""
    return _git("merge-base", "--is-ancestor", commit or "none", "HEAD") is not None


def _git(*words: str) -> str | None:
    checkout = Path(titan_loop.__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    versions = {"titan_loop": titan_loop.__version__, "python": platform.python_version()}
    for name in ("torch", "torchtitan", "numpy"):
        try:
            versions[name] = _version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


@cache  # every save asks, and reading a package's metadata takes milliseconds
def _version(package: str) -> str:
    return metadata.version(package)
