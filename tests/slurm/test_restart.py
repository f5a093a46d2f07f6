"""A job's batch step from start to start, with stand-ins for srun and scontrol on its PATH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Torch takes seconds to import, and no rank trains here: `train` itself is a stand-in, too.
RANK = """
import sys
from types import SimpleNamespace
from tests.slurm.endings import as_told
from titan_loop.cli.main import main
sys.modules["titan_loop.cli.train"] = SimpleNamespace(run=lambda arguments: as_told())
sys.exit(main())
"""

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
flags = [argument for argument in sys.argv if argument.startswith("--ntasks=")]
command = sys.argv[sys.argv.index(sys.executable):]
assert command[1:4] == ["-m", "titan_loop", "train"], command
ranks = [
    subprocess.Popen(
        [command[0], "-c", {RANK!r}, *command[3:]],
        env={{**os.environ, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"n{{rank + 1}}"}},
    )
    for rank in range(int(flags[0].partition("=")[2]))
]
codes = [rank.wait() for rank in ranks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""

SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") echo n1; echo n2 ;;
"show --oneliner") echo "JobId=7 JobState=RUNNING" ;;
"requeue 7") echo requeued >> "$REQUEUES" ;;
"update JobId=7") echo "$3" >> "$REQUEUES.updates" ;;
esac
"""


class Job:
    """Job 7 of two ranks, which end as they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self._requeues = folder / "requeues"
        self._bin = folder / "bin"
        self._starts = 0
        self._bin.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)

    @property
    def requeues(self) -> int:
        return len(self._requeues.read_text().split()) if self._requeues.exists() else 0

    @property
    def updates(self) -> list[str]:
        return Path(f"{self._requeues}.updates").read_text().split()

    def start(self, endings: str) -> tuple[int, str]:
        """Start the job once; return its exit code and what it said."""
        environment = {
            **os.environ,
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "REQUEUES": str(self._requeues),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_RESTART_COUNT": str(self._starts),
            "TEST_ENDINGS": endings,
        }
        self._starts += 1
        done = subprocess.run(
            [
                *(sys.executable, "-m", "titan_loop", "slurm", "run"),
                *("tests.slurm.endings:as_told", f"--dump-folder={self.folder}"),
                "--no-node-check",
            ],
            env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    def save(self, step: int) -> None:
        manifest = self.folder / "checkpoints" / f"step-{step}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("endings", "said"),
    [
        ("75 134", "code 134; of 2 ranks, 1 with code 75, 1 without a report"),
        ("1 137", "code 137; of 2 ranks, 1 with code 1, 1 without a report"),
        ("75 1", "code 75; of 2 ranks, 1 with code 1, 1 with code 75"),
    ],
)
def test_a_crash_is_started_again(job, endings, said):
    code, log = job.start(endings)
    assert (code, job.requeues) == (75, 1)
    assert f"srun ended with {said}" in log


@pytest.mark.parametrize(
    ("endings", "final"), [("2 137", 2), ("3 134", 3), ("130 137", 130), ("0 0", 0)]
)
def test_what_another_start_would_not_change_ends_the_job(job, endings, final):
    code, log = job.start(endings)
    assert (code, job.requeues) == (final, 0)
    assert ("finished" if final == 0 else f"failed with code {final}: not started again") in log


def test_a_mistake_that_one_node_alone_reports_is_that_of_the_node(job):
    code, log = job.start("75 2")
    assert (code, job.requeues) == (75, 1)
    assert job.updates == ["ExcNodeList=n2"]
    assert "bad node n2: its ranks alone ended with code 2, a mistake" in log


def test_three_starts_in_a_row_without_a_new_checkpoint_end_the_job(job):
    job.start("134 1")
    job.start("134 1")
    job.save(10)  # by the second start's ranks, say
    for endings in ("1 1", "134 137"):
        assert job.start(endings)[0] == 75
    assert job.requeues == 4
    code, log = job.start("1 137")
    assert (code, job.requeues) == (1, 4)
    assert "3 starts without a new checkpoint: not started again" in log
