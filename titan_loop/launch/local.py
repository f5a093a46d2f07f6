"""Jobs as processes of this machine: to try a chain of jobs without a cluster, and for tests.

    submit ─► a process that waits for the parent's job, then runs the script from start to start
        its batch step ─► `step` ─► a process for every rank, on nodes "local-1", "local-2", …

A job is a folder `JOBS/NUMBER`, JOBS being `TITAN_LOOP_LOCAL_JOBS`, and its state a line of a file.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from titan_loop.errors import EXIT_OK, UserError
from titan_loop.launch.scheduler import RUNNING, Allocation, JobStatus, Resources
from titan_loop.launch.site import Site
from titan_loop.launcher import NODE_VARIABLE

JOBS_VARIABLE = "TITAN_LOOP_LOCAL_JOBS"
_JOB, _START, _SHAPE = (f"TITAN_LOOP_LOCAL_{name}" for name in ("JOB", "START", "SHAPE"))
_POLL_SECONDS = 0.05


class Local:
    """Runs every job at once; there is no time limit."""

    def __init__(self) -> None:
        self._jobs = Path(os.environ.get(JOBS_VARIABLE, "~/.cache/titan_loop/jobs")).expanduser()

    def script(
        self, name: str, command: Sequence[str], log: Path, resources: Resources, site: Site
    ) -> str:
        """Return a script that writes all it says to `log`."""
        shape = f"{resources.nodes} {resources.ranks_per_node} {resources.gpus_per_node}"
        to_log = f"exec >>{shlex.quote(str(log))} 2>&1"
        return site.batch_script([f"export {_SHAPE}='{shape}'", to_log], command)

    def submit(self, script: Path, *, after: str | None, environment: Mapping[str, str]) -> str:
        """Start the process of a job, which outlives this one."""
        self._jobs.mkdir(parents=True, exist_ok=True)
        # Not from 1: if the folder was lost, recipes still hold the numbers of its jobs.
        begin = int(time.time())
        job = str(1 + max((int(path.name) for path in self._jobs.iterdir()), default=begin))
        (self._jobs / job).mkdir()
        self._write(job, "state", "PENDING")
        command = [sys.executable, "-m", __name__, "job", job, str(script), after or ""]
        own = {**environment, JOBS_VARIABLE: str(self._jobs)}
        # No `Popen`, which would warn that the process outlives this one.
        self._write(job, "process", str(os.posix_spawn(command[0], command, own, setsid=True)))
        return job

    def state(self, job: str) -> JobStatus:
        """Return the state of a job; "GONE" without its folder."""
        state = self._read(job, "state") or "GONE"
        starts = self._read(job, "starts") or "1"
        return JobStatus(
            job, state, state in ("PENDING", RUNNING), str(int(starts) - 1), nodes="local"
        )

    def cancel(self, job: str) -> None:
        """Ask the ranks of a job to save and end."""
        self._write(job, "state", "CANCELLED")
        with suppress(ProcessLookupError):
            os.killpg(int(self._read(job, "process")), signal.SIGTERM)

    def allocation(self, environment: Mapping[str, str]) -> Allocation:
        """Return the job of this batch step; excluded nodes are passed over."""
        if _JOB not in environment:
            raise UserError("slurm run is for batch scripts; use titan-loop slurm submit")
        nodes, ranks, gpus = map(int, environment[_SHAPE].split())
        job = environment[_JOB]
        bad = self._read(job, "excluded").split()
        names = (f"local-{number}" for number in range(1, nodes + len(bad) + 1))
        return Allocation(
            job=job,
            restarts=int(environment[_START]) - 1,
            nodes=tuple(name for name in names if name not in bad)[:nodes],
            ranks_per_node=ranks,
            gpus_per_node=gpus,
        )

    def step(
        self, where: Allocation, site: Site, command: Sequence[str], *, wait: int
    ) -> list[str]:
        """Return the command that starts the ranks, and waits for them."""
        shape = [str(wait), ",".join(where.nodes), str(where.ranks_per_node)]
        return [sys.executable, "-m", __name__, "step", *shape, *site.program, *command]

    def end_steps(self, job: str) -> None:
        """Kill the ranks."""
        for rank in self._read(job, "ranks").split():
            with suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)

    def note_ranks(self, job: str, ranks: Sequence[int]) -> None:
        """Record the processes of a step for `end_steps`."""
        self._write(job, "ranks", " ".join(map(str, ranks)))

    def start_again(self, job: str, *, exclude: Sequence[str]) -> str:
        """Note that the script is to run again."""
        excluded = " ".join([*self._read(job, "excluded").split(), *exclude])
        self._write(job, "excluded", excluded)
        self._write(job, "again", "")
        return f"job {job} starts again" + (f" without {excluded}" if exclude else "")

    def run(self, job: str, script: str, after: str) -> None:
        """Be the process of a job."""
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # passed on by the group
        while after and self.state(after).is_active:
            time.sleep(_POLL_SECONDS)
        if after and self.state(after).state != "COMPLETED":
            self._write(job, "state", "CANCELLED")
        starts, code = 0, EXIT_OK
        again = self._jobs / job / "again"
        while self.state(job).is_active and (starts == 0 or again.exists()):
            again.unlink(missing_ok=True)
            starts += 1
            self._write(job, "starts", str(starts))
            self._write(job, "state", RUNNING)
            own = {**os.environ, _JOB: job, _START: str(starts)}
            code = subprocess.run(["bash", script], env=own, check=False).returncode
        if self.state(job).is_active:
            self._write(job, "state", "FAILED" if code else "COMPLETED")

    def _read(self, job: str, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self._jobs / job / name).read_text()
        return ""

    def _write(self, job: str, name: str, text: str) -> None:
        path = self._jobs / job / f".{name}-{os.getpid()}"
        with suppress(FileNotFoundError):  # a job without its folder is "GONE", and ends itself
            path.write_text(text)
            path.replace(self._jobs / job / name)


SCHEDULER = Local


def run_step(wait: float, nodes: Sequence[str], ranks_per_node: int, command: Sequence[str]) -> int:
    """Start a rank for every place and wait for all; return the highest exit code."""
    size = len(nodes) * ranks_per_node
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    signal.signal(signal.SIGUSR1, pass_on)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # the whole group hears it
    for rank in range(size):
        node, local = divmod(rank, ranks_per_node)
        place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size}
        place["LOCAL_WORLD_SIZE"] = ranks_per_node
        own = {**os.environ, NODE_VARIABLE: nodes[node], "MASTER_ADDR": "127.0.0.1"}
        own |= {name: str(value) for name, value in place.items()}
        ranks.append(subprocess.Popen(command, env=own))
    Local().note_ranks(os.environ[_JOB], [rank.pid for rank in ranks])
    left = float("inf")
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() is not None for rank in ranks):
            left = min(left, time.monotonic() + wait)
        if time.monotonic() > left:
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_SECONDS)
    codes = [rank.wait() for rank in ranks]
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "job":
        Local().run(*arguments)
    else:
        seconds, names, count, *program = arguments
        sys.exit(run_step(float(seconds), names.split(","), int(count), program))
