"""The clock of a job's steps; needs no SLURM."""

import math
import os
import subprocess

import pytest

from titan_loop.slurm import job
from titan_loop.slurm.allocation import Allocation

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)


class Check:
    """A process, and the clock of its job: it starts after 500 s and takes 100 s from then on."""

    def __init__(self, starts: bool) -> None:
        self.now, self.starts, self.killed = 0.0, starts, False

    def __call__(self, *args: object, **options: object) -> "Check":  # as Popen
        return self

    def __enter__(self) -> "Check":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def there(self) -> bool:
        return self.starts and self.now >= 500

    def poll(self) -> int | None:
        return 0 if self.starts and self.now >= 600 else None

    def wait(self, limit: float | None = None) -> int:
        if self.killed:
            return -9
        end = 600.0 if self.starts else math.inf
        if limit is not None and self.now + limit < end:
            self.now += limit
            raise subprocess.TimeoutExpired("check", limit)
        self.now = end
        return 0

    def kill(self) -> None:
        self.killed = True

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("starts", "code"), [(True, 0), (False, 137)])
def test_the_clock_of_a_check_starts_with_its_last_rank(monkeypatch, tmp_path, starts, code):
    """Importing torch on every node may take longer than the check itself."""
    check = Check(starts)
    monkeypatch.setattr(job, "time", check)
    monkeypatch.setattr(job.subprocess, "Popen", check)
    monkeypatch.setattr(job.signal, "signal", lambda number, handler: None)  # of this process
    killed: list[str] = []
    monkeypatch.setattr(job, "end_steps", killed.append)
    what = job.Job(train=(), folder=tmp_path, stage=None, save_seconds=1, check=None)
    with job._Steps(what, ALLOCATION) as steps:
        assert steps.run(["check"], os.environ, limit=400, started=check.there) == code
    assert killed == ([] if starts else ["123"])
