"""SLURM: batch scripts, sbatch, srun, scontrol, squeue and scancel."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_loop.errors import RunFailedError, UserError
from titan_loop.launch.scheduler import Allocation, JobStatus, Resources, SchedulerError
from titan_loop.launch.site import Site
from titan_loop.launcher import slurm_job

_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)  # any other state is one of a job that may start
_FORGOTTEN = "Invalid job id"  # in an answer about a job that SLURM has forgotten
_NAME = r"[A-Za-z][\w:/]*="
_FIELD = re.compile(rf"(?:^|\s)({_NAME[:-1]})=(.*?)(?=\s+{_NAME}|\s*$)")  # a value may have spaces
_GPUS = re.compile(r"--gres=(.*\W)?gpu\b")
_SECONDS = 60.0
_WAITS = (5, 15, 40)
_UPDATE_ATTEMPTS = 5
EARLY_SECONDS = 60
"""SLURM checks time limits only now and then, so its warning may come up to a minute early."""

_OWN_FLAGS = {
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--signal", "--job-name"),
    *("--output", "--open-mode", "--requeue", "--no-requeue", "--dependency", "--array"),
    *("--partition", "--account", "--wait"),
}
# sbatch prefers these to a script's directives.
_OVERRIDING = {
    *("SBATCH_TIMELIMIT", "SBATCH_GPUS_PER_NODE", "SBATCH_SIGNAL", "SBATCH_JOB_NAME"),
    *("SBATCH_OPEN_MODE", "SBATCH_NO_REQUEUE", "SBATCH_ARRAY_INX", "SBATCH_OUTPUT", "SBATCH_ERROR"),
    "SBATCH_WAIT",
}


class Slurm:
    """The scheduler of most clusters; never asked for anything but its own commands."""

    def script(
        self, name: str, command: Sequence[str], log: Path, resources: Resources, site: Site
    ) -> str:
        """Return a batch script: directives, the site file and one command."""
        extra = (*site.sbatch_flags, *resources.flags)
        _check(resources, extra)
        gpus = ":".join(filter(None, (resources.gpu_type, str(resources.gpus_per_node))))
        own_gpus = not resources.gpus_per_node or any(map(_GPUS.match, extra))
        directives = [
            f"--job-name={name}",
            f"--nodes={resources.nodes}",
            f"--ntasks-per-node={resources.ranks_per_node}",
            *([] if own_gpus else [f"--gpus-per-node={gpus}"]),
            f"--time={resources.time}",
            *([f"--partition={shlex.quote(site.partition)}"] if site.partition else []),
            *([f"--account={shlex.quote(site.account)}"] if site.account else []),
            f"--output={shlex.quote(str(log).replace('%', '%%'))}",  # a % begins a pattern
            "--open-mode=append",
            # B: signals the batch step alone, which passes the signal on to the ranks.
            f"--signal=B:USR1@{resources.save_seconds}",
            "--requeue",
            "--kill-on-invalid-dep=yes",
            *(shlex.join([flag]) for flag in extra),
        ]
        return site.batch_script([f"#SBATCH {directive}" for directive in directives], command)

    def submit(self, script: Path, *, after: str | None, environment: Mapping[str, str]) -> str:
        """Submit a job; lines that a site's wrapper of sbatch prints are passed over."""
        if found := _OVERRIDING & environment.keys():
            name = min(found)
            raise UserError(
                f"{name}={environment[name]} would override what submit writes; unset it in the "
                "shell and the site file"
            )
        chained = [] if after is None else [f"--dependency=afterok:{after}"]
        command = ("sbatch", "--parsable", *chained, str(script))
        answer = slurm(*command, environment=outside_of_a_job(environment))
        numbers = re.findall(r"^\s*(\d+)(?:;\S+)?\s*$", answer, re.MULTILINE)
        if not numbers:
            raise RunFailedError(
                f"sbatch answered {' '.join(answer.split())!r}, and no line of it is a job's "
                "number; the job may be queued all the same: look with squeue, and call SLURM's "
                "own sbatch"
            )
        return numbers[-1]

    def state(self, job: str) -> JobStatus:
        """Return the state of a job; "GONE" once SLURM has forgotten it."""
        try:
            shown = show("job", job)
        except SchedulerError as error:
            if _FORGOTTEN not in str(error):
                raise
            return JobStatus(job, "GONE")
        return JobStatus(
            job,
            shown["JobState"],
            shown["JobState"] not in _ENDED,
            restarts=shown.get("Restarts", "0"),
            elapsed=shown["RunTime"],
            nodes=shown.get("NodeList", "").removeprefix("(null)"),
            reason="" if shown["Reason"] == "None" else shown["Reason"],
        )

    def cancel(self, job: str) -> None:
        """Cancel a job; its ranks have `KillWait` to save."""
        slurm("scancel", job)

    def allocation(self, environment: Mapping[str, str]) -> Allocation:
        """Return the job of a batch script, as SLURM's variables describe it."""
        job = slurm_job(environment)
        if "SLURM_ARRAY_JOB_ID" in environment:  # the number of the last task is the whole array's
            job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
        if job is None:
            raise UserError(
                "slurm run is for batch scripts; use titan-loop slurm submit, or sbatch "
                "slurm/pretrain.sbatch"
            )
        ranks = environment.get("SLURM_NTASKS_PER_NODE", "")
        if not ranks.isdigit():
            raise UserError(
                "the batch script sets no number of ranks for a node; add --ntasks-per-node, one "
                "for each GPU"
            )
        # The first is COUNT or TYPE:COUNT; --gres sets only the second, for the batch step's node.
        gpus = environment.get("SLURM_GPUS_PER_NODE") or environment.get("SLURM_GPUS_ON_NODE", "0")
        gpus = gpus.rpartition(":")[2]
        return Allocation(
            job=job,
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            nodes=tuple(host_names(environment["SLURM_JOB_NODELIST"])),
            ranks_per_node=int(ranks),
            gpus_per_node=int(gpus) if gpus.isdigit() else 0,
        )

    def step(
        self, where: Allocation, site: Site, command: Sequence[str], *, wait: int
    ) -> list[str]:
        """Return the `srun` that starts every rank."""
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        return [
            "srun",
            f"--nodes={len(where.nodes)}",
            f"--ntasks={where.ranks}",
            f"--ntasks-per-node={where.ranks_per_node}",
            *([f"--cpus-per-task={cpus}"] if cpus else []),  # srun does not inherit it
            "--kill-on-bad-exit=0",  # while one rank exits with code 75, others may still save
            f"--wait={wait}",
            "--export=ALL",  # a job submitted with --export=NONE gives its steps no environment
            *site.srun_flags,
            *site.program,
            *command,
        ]

    def end_steps(self, job: str) -> None:
        """Kill the tasks of a job's steps."""
        steps = slurm("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i").split()
        for step in steps:
            if step.rpartition(".")[2].isdigit():
                with suppress(SchedulerError):  # it may just have ended
                    slurm("scancel", "--signal=KILL", step)

    def start_again(self, job: str, *, exclude: Sequence[str]) -> str:
        """Requeue the job, which keeps its log and its place in the chain."""
        earlier = show("job", job).get("ExcNodeList", "(null)")
        excluded = ",".join([*exclude] if earlier == "(null)" else [earlier, *exclude])
        try:
            slurm("scontrol", "requeue", job)
        except SchedulerError as error:
            if self.state(job).state == "RUNNING":  # else only the answer was lost
                raise SchedulerError(f"{error}; submit the job again to go on") from error
        # Only a pending job can exclude nodes; this process lives until KillWait has passed.
        for attempt in range(_UPDATE_ATTEMPTS if exclude else 0):
            try:
                slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={excluded}")
                break
            except SchedulerError:
                if attempt == _UPDATE_ATTEMPTS - 1:
                    raise
        return f"job {job} requeued" + (f" without {excluded}" if exclude else "")


SCHEDULER = Slurm


def slurm(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run one of SLURM's commands, which must answer within a minute, and return its output."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not on PATH; run this on a node of the cluster that has SLURM's "
            "commands (or add --dry-run)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{command[0]} did not answer within {_SECONDS:g} s") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"
        raise SchedulerError(f"{' '.join(command[:2])}: {said}")
    return done.stdout


def show(kind: str, name: str) -> dict[str, str]:
    """Return the fields of `scontrol show KIND NAME`; a controller out of reach is asked again."""
    waits = [*_WAITS]
    while True:
        try:
            said = slurm("scontrol", "show", "--oneliner", kind, name)
            return dict(_FIELD.findall(said.splitlines()[0]))
        except SchedulerError as error:
            if _FORGOTTEN in str(error) or not waits:
                raise
            time.sleep(waits.pop(0))


def host_names(node_list: str) -> list[str]:
    """Return the nodes of a compressed list such as `n[1-4,7]`."""
    return slurm("scontrol", "show", "hostnames", node_list).split() if node_list else []


def outside_of_a_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without this job's variables; `sbatch` would pass them to new jobs."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SLURMD_", "SRUN_")) or name == "SLURM_CONF"
    }


def parse_seconds(time: str) -> int:
    """Convert a time of `sbatch --time` (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) to seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise UserError(f"--time={time} is not a time limit; write H:M:S or D-H:M:S")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]  # minutes come first
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds


def _check(resources: Resources, flags: Sequence[str]) -> None:
    needed = resources.save_seconds + EARLY_SECONDS
    if parse_seconds(resources.time) <= needed:
        raise UserError(
            f"--time={resources.time} leaves nothing to train in: saving may take "
            f"--save-seconds={resources.save_seconds}, and SLURM warns up to {EARLY_SECONDS} s "
            f"early; give it more than {needed} s"
        )
    for flag in flags:
        name = flag.partition("=")[0]
        if not flag.startswith("--") or " " in name:
            problem = f"has {flag!r}; write every flag of sbatch as --NAME or --NAME=VALUE"
        elif name in _OWN_FLAGS:
            problem = (
                f"has {flag}, which submit sets itself; use its own flags or SBATCH_ variables"
            )
        else:
            continue
        raise UserError(f"TITAN_LOOP_SBATCH_FLAGS or --sbatch {problem}")
