"""A real cluster on this machine, started by `tools/test_slurm.sh`, and what tests ask of it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.errors import EXIT_OK
from titan_loop.launch.record import records_folder
from titan_loop.launch.scheduler import Resources
from titan_loop.launch.site import Site
from titan_loop.launch.slurm import Slurm, show, slurm
from titan_loop.runs.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
RECIPES, ENDINGS = "tests.launch.recipes", "tests.launch.endings"
TEST_CLUSTER = "titan-loop-test"
PATIENCE_SECONDS = 1200
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
SAVE_SECONDS = 60

SITE = """
export TITAN_LOOP_RENDEZVOUS_HOST=127.0.0.1
export TITAN_LOOP_NETWORK_INTERFACE=lo
export OMP_NUM_THREADS=1
"""


def wait_for(what: Callable[[], bool], description: str) -> None:
    """Wait, generously, until something is true; fail with `description` if it never is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_SECONDS} s: {description}")
        time.sleep(0.3)


@dataclass
class Cluster:
    """The test cluster, seen from a user's folder."""

    site: Path

    def submit(self, recipe: str, folder: Path, *flags: str, nodes: int = 2) -> dict[str, str]:
        """Submit a recipe through the command line; return stage → job."""
        from titan_loop.launch.record import read_jobs

        code = main(
            [
                *("slurm", "submit", f"{RECIPES}:{recipe}", f"--nodes={nodes}"),
                *("--gpus-per-node=0", "--ranks-per-node=1", "--time=10:00"),
                f"--save-seconds={SAVE_SECONDS}",
                *(f"--site={self.site}", f"--dump-folder={folder}", *flags),
            ]
        )
        assert code == EXIT_OK
        return read_jobs(folder)

    def batch(
        self,
        recipe: str,
        folder: Path,
        *sbatch_flags: str,
        nodes: int = 1,
        run: tuple[str, ...] = ("--no-node-check",),
        save_seconds: int = SAVE_SECONDS,
    ) -> str:
        """Submit the script of one job with flags of sbatch; return its number."""
        module = RECIPES if recipe == "one_run" else ENDINGS
        resources = Resources(
            nodes=nodes, ranks_per_node=1, gpus_per_node=0, time="10", save_seconds=save_seconds
        )
        command = ["slurm", "run", f"{module}:{recipe}", f"--dump-folder={folder}"]
        command += [f"--save-seconds={save_seconds}", *run]
        log, site = self.log(folder, "job"), Site(file=self.site)
        script = Slurm().script(recipe, command, log, resources, site)
        path = records_folder(folder) / "job.sbatch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        return slurm("sbatch", "--parsable", *sbatch_flags, str(path)).strip()

    @staticmethod
    def log(folder: Path, name: str) -> Path:
        return records_folder(folder) / f"{name}.log"

    @staticmethod
    def state(job: str) -> str:
        return show("job", job)["JobState"]

    def hurry(self, job: str) -> None:
        """Spare a requeued job most of the two minutes SLURM lets it wait."""
        fields = show("job", job)
        if fields["JobState"] != "PENDING" or fields["Reason"] != "BeginTime":
            return
        waits = datetime.fromisoformat(fields["EligibleTime"]) - datetime.now()
        if waits.total_seconds() > 30:
            # Its nodes refuse a job within a second of its last start.
            slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def wait_until_it_ends(self, job: str, log: Path | None = None) -> str:
        """Return the final state of a job, through all of its restarts."""

        def ended() -> bool:
            self.hurry(job)
            return self.state(job) in ENDED

        try:
            wait_for(ended, f"job {job} is {self.state(job)}")
        finally:
            if log is not None and log.exists():
                print(log.read_text()[-8000:])
        return self.state(job)

    def wait_for_step(self, folder: Path, step: int, job: str) -> None:
        """Wait until a run has logged a step."""

        def there() -> bool:
            self.hurry(job)
            return any(r["step"] >= step for r in RunDirectory(folder).read_metrics())

        wait_for(there, f"{folder} has no step {step}")


def losses(folder: Path) -> list[float]:
    """Return the losses of a run, those of repeated steps once."""
    return [record["loss"] for record in RunDirectory(folder).read_metrics()]


@pytest.fixture(scope="session")
def slurm_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment jobs are submitted with; returns the site file."""
    config = os.environ.get("SLURM_CONF", "")
    if not config or f"ClusterName={TEST_CLUSTER}" not in Path(config).read_text():
        pytest.skip("needs the cluster that tools/test_slurm.sh starts on this machine")
    site = tmp_path_factory.mktemp("site") / "site.sh"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        known = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(known))
        site.write_text(f"{SITE}export PYTHONPATH={os.environ['PYTHONPATH']}\n")
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield site
    subprocess.run(["scancel", "-u", str(os.getuid())], check=False)


@pytest.fixture
def cluster(slurm_environment: Path) -> Cluster:
    """The cluster; skips where there is none."""
    return Cluster(slurm_environment)
