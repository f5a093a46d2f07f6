"""Which ends have a job started again, and the commands that do it; needs no SLURM."""

from collections.abc import Callable

import pytest

from titan_loop.runs.exit_reports import RankExit
from titan_loop.slurm import commands, requeue
from titan_loop.slurm.commands import CommandFailedError
from titan_loop.slurm.record import read_jobs, write_jobs
from titan_loop.slurm.requeue import end_steps, final_code, lone_node, start_again

JOB = {
    "JobName": "1a",
    "NumNodes": "2-2",
    "TimeLimit": "01:00:00",
    "Partition": "gpu",
    "Account": "(null)",
    "StdOut": "/runs/1a.log",
    "WorkDir": "/home",
    "Command": "/runs/1a.sbatch --stage 1a",
    "Features": "(null)",
    "TresPerNode": "gres:gpu:a100:8",
    "MinMemoryNode": "100G",
    "CPUs/Task": "4",
    "NtasksPerN:B:S:C": "8:0:*:*",
    "JobState": "RUNNING",
}


class Slurm:
    """Answers by the words a command begins with; a callable may fail."""

    def __init__(self, **answers: str | Callable[[], str]) -> None:
        self.said: list[tuple[str, ...]] = []
        self.environments: list[dict[str, str] | None] = []
        self.answers = answers

    def __call__(self, *command: str, environment: dict[str, str] | None = None) -> str:
        self.said.append(command)
        self.environments.append(environment)
        answer = self.answers.get(command[1] if command[0] == "scontrol" else command[0], "")
        return answer if isinstance(answer, str) else answer()


def refused() -> str:
    raise CommandFailedError("scontrol requeue: disabled")


@pytest.fixture
def install(monkeypatch) -> Callable[..., Slurm]:
    def put(fields: dict[str, str] = JOB, **answers: str | Callable[[], str]) -> Slurm:
        slurm = Slurm(**answers)
        for module in (requeue, commands):
            monkeypatch.setattr(module, "slurm", slurm)
        monkeypatch.setattr(requeue, "show", lambda kind, name: fields)
        return slurm

    return put


@pytest.mark.parametrize(
    ("code", "exits", "final"),
    [
        (0, [0, 0], 0),
        (75, [75, 75], None),  # stopped and saved
        (134, [75], None),  # a hung rank's peer aborted
        (137, [1], None),
        (75, [75, 1], None),
        (138, [], None),  # died of SIGUSR1 before Python could handle it
        (134, [0], None),  # complete, but a rank aborted on its way out
        (1, [], None),  # srun itself failed
        (2, [2, 2], 2),
        (137, [2], 2),  # the others waited for it and were killed
        (134, [75, 3], 3),
        (130, [], 130),
    ],
)
def test_which_exits_have_a_job_started_again(code, exits, final):
    reports = [RankExit(rank, f"n{rank}", exit) for rank, exit in enumerate(exits)]
    assert final_code(code, reports) == final


@pytest.mark.parametrize(
    ("mistaken", "lone"),
    [
        ([(3, "n2")], "n2"),
        ([(2, "n2"), (3, "n2")], "n2"),
        ([(0, "n1"), (1, "n1")], ""),  # rank 0 says so
        ([(3, "n2"), (4, "n3")], ""),  # two nodes do
        ([(3, "")], ""),  # its node is unknown
    ],
)
def test_a_mistake_of_one_node_without_rank_zero_is_the_node_s(mistaken, lone):
    exits = [RankExit(rank, node, 2) for rank, node in mistaken] + [RankExit(9, "n9", 75)]
    assert lone_node(exits) == lone
    assert final_code(143, exits) == (None if lone else 2)
    assert final_code(2, exits) == (None if lone else 2)
    assert final_code(143, [*exits, RankExit(8, "n8", 3)]) == (3 if lone else 2)


@pytest.mark.parametrize(
    ("earlier", "exclude", "left_out"),
    [
        ("(null)", (), ""),
        ("n1", (), ""),  # SLURM still leaves it out
        ("(null)", ("n2", "n3"), "n2,n3"),
        ("n1", ("n2",), "n1,n2"),
    ],
)
def test_a_job_is_requeued_without_bad_nodes(install, tmp_path, earlier, exclude, left_out):
    slurm = install({**JOB, "ExcNodeList": earlier})
    said = start_again("7", exclude=exclude, folder=tmp_path, name="1a", save_seconds=70)
    update = ("scontrol", "update", "JobId=7", f"ExcNodeList={left_out}")
    assert slurm.said == [("scontrol", "requeue", "7"), *([update] if left_out else [])]
    assert said == "job 7 requeued" + (f" without {left_out}" if left_out else "")


@pytest.mark.parametrize(("failures", "tried"), [(0, 1), (4, 5), (5, 5)])
def test_leaving_nodes_out_is_tried_five_times(install, tmp_path, failures, tried):
    """The last failure is raised."""
    left = [failures]

    def update() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise CommandFailedError("scontrol update: the job is not pending")
        return ""

    slurm = install(update=update)
    if failures == 5:
        with pytest.raises(CommandFailedError, match="not pending"):
            start_again("7", exclude=("n2",), folder=tmp_path, name="1a", save_seconds=70)
    else:
        start_again("7", exclude=("n2",), folder=tmp_path, name="1a", save_seconds=70)
    assert len(slurm.said) == 1 + tried


@pytest.mark.parametrize("answer", ["9\n", "9;cluster\n", "Project p: 17 GPU-hours left\n9\n"])
def test_a_successor_goes_on_where_a_requeue_is_refused(
    install, tmp_path, monkeypatch, answer: str
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write_jobs(tmp_path, {"1a": "7", "1b": "8"})
    queue = "8|afterok:7(unfulfilled)\n9|afterany:7(unfulfilled)\n6|afterok:77(unfulfilled)\n5|\n"
    slurm = install(requeue=refused, sbatch=answer, squeue=queue)
    said = start_again("7", exclude=("n2",), folder=tmp_path, name="1a", save_seconds=70)
    assert said == "scontrol requeue: disabled; job 9 goes on in its place; 8 wait for it now"
    assert read_jobs(tmp_path) == {"1a": "9", "1b": "8"}
    script = str(tmp_path / "slurm" / "1a.next")
    assert slurm.said[1:] == [
        ("scontrol", "write", "batch_script", "7", script),
        (
            *("sbatch", "--parsable", "--open-mode=append", "--dependency=afterany:7"),
            *("--job-name=1a", "--nodes=2", "--time=01:00:00", "--partition=gpu"),
            *("--gres=gpu:a100:8", "--mem=100G", "--cpus-per-task=4", "--ntasks-per-node=8"),
            *("--output=/runs/1a.log", "--chdir=/home", "--exclude=n2", "--signal=B:USR1@70"),
            *(script, "--stage", "1a"),
        ),
        ("squeue", "--noheader", "--format=%i|%E"),
        ("scontrol", "update", "JobId=8", "Dependency=afterok:9"),
    ]
    environment = slurm.environments[2]
    assert environment is not None
    assert environment["TITAN_LOOP_SUCCESSOR_OF"] == "7"
    assert "SLURM_JOB_ID" not in environment


def test_a_requeue_whose_answer_was_lost_has_no_successor(install, tmp_path):
    slurm = install({**JOB, "JobState": "PENDING"}, requeue=refused)
    said = start_again("7", exclude=("n2",), folder=tmp_path, name="1a", save_seconds=70)
    assert said == "job 7 requeued without n2"
    assert [command[0] for command in slurm.said] == ["scontrol", "scontrol"]


def test_a_successor_without_dependents(install, tmp_path):
    install(requeue=refused, sbatch="9\n")
    said = start_again("7", exclude=(), folder=tmp_path, name="1a", save_seconds=70)
    assert said == "scontrol requeue: disabled; job 9 goes on in its place"


def test_a_successor_stays_off_nodes_that_were_left_out_before(install, tmp_path):
    slurm = install({**JOB, "ExcNodeList": "n5"}, requeue=refused, sbatch="8")
    start_again("7", exclude=(), folder=tmp_path, name="1a", save_seconds=70)
    assert [word for said in slurm.said for word in said if word.startswith("--exclude")] == [
        "--exclude=n5"
    ]


def test_all_steps_but_the_batch_step_are_killed(install):
    def gone() -> str:
        raise CommandFailedError("scancel: the step has ended")

    slurm = install(squeue="7.0\n7.batch\n7.1\n7.extern\n", scancel=gone)
    end_steps("7")
    assert slurm.said == [
        ("squeue", "--noheader", "--steps", "--jobs=7", "--format=%i"),
        ("scancel", "--signal=KILL", "7.0"),
        ("scancel", "--signal=KILL", "7.1"),
    ]
