"""Chains of real processes under the local scheduler: from submission through every restart.

No rank trains here, which would import torch: `train` ends each as `endings.py` says.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.launch.local import JOBS_VARIABLE, Local
from titan_loop.launch.record import read_restarts, write_jobs
from titan_loop.launch.scheduler import SCHEDULER_VARIABLE, Resources, find_scheduler
from titan_loop.launch.site import Site

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from types import SimpleNamespace
from tests.launch.endings import as_told
from titan_loop.cli.main import main
sys.modules["titan_loop.cli.train"] = SimpleNamespace(run=lambda arguments: as_told())
sys.exit(main(sys.argv[2:]))
"""
TWO_NODES = Resources(nodes=2, ranks_per_node=1, gpus_per_node=0, time="1", save_seconds=60)


class Jobs:
    """Jobs of two ranks, which end as they are told, start by start."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.scheduler = folder, environment, Local()

    def submit(self, *endings: str, name: str = "job", after: str | None = None) -> str:
        command = ["slurm", "run", "no:recipe", f"--dump-folder={self.folder}", "--no-node-check"]
        script = self.folder / f"{name}.sbatch"
        self.folder.mkdir(exist_ok=True)
        log = self.folder / f"{name}.log"
        script.write_text(self.scheduler.script(name, command, log, TWO_NODES, Site()))
        environment = {**self.environment, "TEST_ENDINGS": ";".join(endings)}
        return self.scheduler.submit(script, after=after, environment=environment)

    def end(self, job: str, name: str = "job") -> tuple[str, str, str]:
        """Return a job's last state, its restarts and its log."""
        while (status := self.scheduler.state(job)).is_active:
            time.sleep(0.05)
        log = self.folder / f"{name}.log"
        return status.state, status.restarts, log.read_text() if log.exists() else ""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setenv(JOBS_VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.setenv(SCHEDULER_VARIABLE, "local")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    container = {"TITAN_LOOP_CONTAINER": f"{sys.executable} -c '{RANK}'"}
    return Jobs(tmp_path / "Ada's run", {**os.environ, **container})


def test_crashes_are_started_again_and_bad_nodes_left_out(jobs: Jobs):
    state, restarts, log = jobs.end(jobs.submit("75 134", "75 2", "0 0"))
    assert (state, restarts) == ("COMPLETED", "2")
    said = "the ranks ended with code 134; of 2 ranks, 1 with code 75, 1 without a report"
    assert said in log
    assert "bad node local-2: its ranks alone ended with code 2, a mistake" in log
    assert "start 3, on local-1, local-3" in log
    assert [*read_restarts(jobs.folder, "job").bad_nodes] == ["local-2"]


def test_what_another_start_would_not_change_ends_the_job(jobs: Jobs):
    state, restarts, log = jobs.end(jobs.submit("3 134"))
    assert (state, restarts) == ("FAILED", "0")
    assert "failed with code 3: not started again" in log


def test_three_starts_in_a_row_without_a_new_checkpoint_end_the_job(jobs: Jobs):
    state, restarts, log = jobs.end(jobs.submit("1 1", "save 1", "1 137", "1 1", "1 1"))
    assert (state, restarts) == ("FAILED", "4")  # the second one saved a checkpoint
    assert "3 starts without a new checkpoint: not started again" in log


def test_a_child_waits_for_its_parent_and_falls_with_it(jobs: Jobs, capsys):
    first = jobs.submit("wait 75", name="first")
    second = jobs.submit("0 0", name="second", after=first)
    write_jobs(jobs.folder, {"first": first, "second": second})
    while jobs.scheduler.state(first).state == "PENDING":
        time.sleep(0.05)
    assert main(["slurm", "status", str(jobs.folder)]) == 0
    shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert shown[1:] == [["first", first, "RUNNING"], ["second", second, "PENDING"]]
    assert main(["slurm", "cancel", str(jobs.folder)]) == 0
    assert f"first: cancelled job {first}" in capsys.readouterr().out
    assert jobs.end(second, "second") == ("CANCELLED", "0", "")
    assert jobs.end(first, "first")[:2] == ("CANCELLED", "0")
    third = jobs.submit("0 0", name="third")
    assert jobs.end(jobs.submit("0 0", after=third))[0] == "COMPLETED"
    shutil.rmtree(os.environ[JOBS_VARIABLE])
    assert jobs.end(fourth := jobs.submit("0 0"))[0] == "COMPLETED"
    assert fourth != first  # which the recipe still records


def test_a_job_whose_folder_vanished_ends_without_a_word(jobs: Jobs, capfd):
    first = jobs.submit("0 0", name="first")
    assert jobs.end(first, "first")[0] == "COMPLETED"
    shutil.rmtree(Path(os.environ[JOBS_VARIABLE]))
    jobs.scheduler.run("8", "no script", after=first)
    jobs.scheduler.note_ranks("8", [1])
    assert jobs.scheduler.state("8").state == "GONE"


def test_a_scheduler_is_found_by_name(monkeypatch: pytest.MonkeyPatch, capsys):
    assert type(find_scheduler({})).__name__ == "Slurm"
    own = {SCHEDULER_VARIABLE: f"{__name__}:Own"}
    assert isinstance(find_scheduler(own), Own)
    monkeypatch.setenv(SCHEDULER_VARIABLE, "lsf")
    assert main(["slurm", "status", "nowhere"]) == 2
    assert "TITAN_LOOP_SCHEDULER=lsf is not a scheduler" in capsys.readouterr().err


class Own(Local):
    """A user's own."""
