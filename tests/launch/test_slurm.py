"""What `Slurm` makes of SLURM's variables and answers, and the commands that it gives; no SLURM."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_loop.errors import RunFailedError, UserError
from titan_loop.launch import slurm as commands
from titan_loop.launch.scheduler import Allocation, SchedulerError
from titan_loop.launch.site import Site
from titan_loop.launch.slurm import Slurm, outside_of_a_job, parse_seconds, show

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)
VARIABLES = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NODELIST": "n[1-2]"}
Answers = dict[str, str | Callable[[], str]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, ...]], Answers]:
    """The commands given, and answers by a command's second word (`scontrol`) or first."""
    given: list[tuple[str, ...]] = []
    answers: Answers = {"show": "JobId=7 JobState=RUNNING RunTime=1 Reason=None"}

    def slurm(*command: str, environment: dict[str, str] | None = None) -> str:
        given.append(command)
        answer = answers.get(command[1] if command[0] == "scontrol" else command[0], "")
        return answer if isinstance(answer, str) else answer()

    monkeypatch.setattr(commands, "slurm", slurm)
    monkeypatch.setattr(commands, "_WAITS", (0, 0))
    return given, answers


def failing(text: str, times: int = 99, then: str = "") -> Callable[[], str]:
    left = [times]

    def answer() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise SchedulerError(text)
        return then

    return answer


def test_a_job_is_read_from_its_variables(said):
    said[1]["show"] = "n1\nn2\n"
    assert Slurm().allocation(VARIABLES) == Allocation(
        job="7", restarts=0, nodes=("n1", "n2"), ranks_per_node=8, gpus_per_node=0
    )
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "3"}
    found = Slurm().allocation({**VARIABLES, **array})  # the last task of array 7
    assert (found.job, found.restarts, found.ranks) == ("7_2", 3, 16)
    for gpus, variables in {
        8: {"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_GPUS_ON_NODE": "2"},
        2: {"SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": "2"},
        0: {"SLURM_GPUS_PER_NODE": "(null)"},
    }.items():
        assert Slurm().allocation({**VARIABLES, **variables}).gpus_per_node == gpus
    with pytest.raises(UserError, match="slurm run is for batch scripts; use titan-loop slurm"):
        Slurm().allocation({"SLURM_NTASKS_PER_NODE": "8"})
    with pytest.raises(UserError, match="--ntasks-per-node"):
        Slurm().allocation({"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "two"})


def test_ports_of_jobs_and_starts_differ():
    """Job 123 has block 7 · 123 + restarts of the 240 blocks of 50 ports from 20,000 on."""
    assert ALLOCATION.port(2) == 20_000 + (7 * 123 + 1) % 240 * 50 + 2
    ports = {
        Allocation(job=job, restarts=start, nodes=(), ranks_per_node=1, gpus_per_node=0).port()
        for job in map(str, range(1000, 1020))
        for start in range(4)
    }
    assert len(ports) == 80
    assert max(ports) + 50 <= 32_768


def test_the_command_and_environment_of_a_step(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    site = Site(container=("apptainer", "exec", "i.sif"), srun_flags=("--mpi=none",))
    assert Slurm().step(ALLOCATION, site, ["train", "x"], wait=40) == [
        *("srun", "--nodes=3", "--ntasks=6", "--ntasks-per-node=2", "--cpus-per-task=4"),
        *("--kill-on-bad-exit=0", "--wait=40", "--export=ALL", "--mpi=none"),
        *("apptainer", "exec", "i.sif", "titan-loop", "train", "x"),
    ]
    site = Site(network_interface="ib0", rendezvous_host="10.0.0.1")
    assert ALLOCATION.rank_environment(site, port=5, environment={"A": "b"}) == {
        "A": "b",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
    }
    assert ALLOCATION.rank_environment(Site(), port=5, environment={})["MASTER_ADDR"] == "n1"


def test_fields_may_have_spaces(said):
    said[1]["show"] = (
        "JobId=7 JobName=a b  Command=/x y.sh --flag=1 TRES:x/y=cpu=4 Comment=\nJobId=8"
    )
    assert show("job", "7") == {
        "JobId": "7",
        "JobName": "a b",
        "Command": "/x y.sh --flag=1",
        "TRES:x/y": "cpu=4",
        "Comment": "",
    }


def test_commands_that_fail_hang_or_are_missing_are_one_line(monkeypatch):
    for program, text in (("echo no such >&2; echo job >&2", "no such job"), ("true", "code 3")):
        with pytest.raises(SchedulerError, match=rf"^sh -c: {text}$"):
            commands.slurm("sh", "-c", f"{program}; exit 3")
    monkeypatch.setattr(commands, "_SECONDS", 0.05)
    with pytest.raises(SchedulerError, match=r"sleep did not answer within 0\.05 s"):
        commands.slurm("sleep", "60")
    with pytest.raises(UserError, match="nonesuch is not on PATH; run this on a node"):
        commands.slurm("nonesuch")


def test_a_controller_out_of_reach_is_asked_again_and_a_forgotten_job_is_not(said):
    given, answers = said
    answers["show"] = failing("Unable to contact slurm controller", 2, "JobId=7")
    assert show("job", "7") == {"JobId": "7"}
    answers["show"] = failing("Unable to contact slurm controller")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        Slurm().state("7")  # its state is unknown: it is not gone
    given.clear()
    answers["show"] = failing("slurm_load_jobs error: Invalid job id specified")
    assert Slurm().state("7")[:3] == ("7", "GONE", False)
    assert len(given) == 1


def test_every_state_that_is_not_an_end_is_active(said):
    for state, active in {"SPECIAL_EXIT": True, "COMPLETED": False, "NODE_FAIL": False}.items():
        said[1]["show"] = f"JobState={state} RunTime=0 Reason=None NodeList=(null)"
        assert Slurm().state("7").is_active is active


def test_time_limits_as_sbatch_reads_them():
    texts = {"90": 5400, "1:30": 90, "2:00:01": 7201, "1-0": 86_400, "1-02:30:05": 95_405}
    assert {text: parse_seconds(text) for text in texts} == texts
    for text in ("", "soon", "1:2:3:4", "-1", "1-", "1.5"):
        with pytest.raises(UserError, match="is not a time limit; write H:M:S or D-H:M:S"):
            parse_seconds(text)


def test_a_new_job_is_not_told_it_is_this_one():
    environment = {"SLURM_JOB_ID": "1", "SLURM_CONF": "c", "HOME": "h", "SLURMD_NODENAME": "n"}
    environment |= {"SRUN_CPUS_PER_TASK": "2", "SLURMX": "kept"}
    assert outside_of_a_job(environment) == {"SLURM_CONF": "c", "HOME": "h", "SLURMX": "kept"}


@pytest.mark.parametrize("answer", ["9\n", "9;cluster\n", "Project p: 17 GPU-hours left\n9\n"])
def test_the_number_of_a_job_is_found_among_a_wrappers_lines(said, answer):
    given, answers = said
    answers["sbatch"] = answer
    assert Slurm().submit(Path("x"), after="7", environment={}) == "9"
    assert given == [("sbatch", "--parsable", "--dependency=afterok:7", "x")]
    answers["sbatch"] = "queued"
    with pytest.raises(RunFailedError, match="'queued', and no line of it is a job's number"):
        Slurm().submit(Path("x"), after=None, environment={})
    for name in ("SBATCH_TIMELIMIT", "SBATCH_OUTPUT", "SBATCH_ERROR"):
        with pytest.raises(UserError, match=f"{name}=9 would override what submit writes"):
            Slurm().submit(Path("x"), after=None, environment={name: "9"})


@pytest.mark.parametrize(
    ("earlier", "exclude", "left_out"),
    [
        ("(null)", (), ""),
        ("n1", (), ""),
        ("(null)", ("n2", "n3"), "n2,n3"),
        ("n1", ("n2",), "n1,n2"),
    ],
)
def test_a_job_is_requeued_without_bad_nodes(said, earlier, exclude, left_out):
    given, answers = said
    answers["show"] = f"JobState=RUNNING ExcNodeList={earlier}"
    answers["update"] = failing("the job is not pending", 4)
    line = Slurm().start_again("7", exclude=exclude)
    update = ("scontrol", "update", "JobId=7", f"ExcNodeList={left_out}")
    assert given[1:] == [("scontrol", "requeue", "7"), *([update] * 5 if left_out else [])]
    assert line == "job 7 requeued" + (f" without {left_out}" if left_out else "")


def test_a_requeue_that_is_refused_is_an_error_unless_only_the_answer_was_lost(said):
    answers = said[1]
    answers["requeue"] = failing("scontrol requeue: disabled")
    with pytest.raises(SchedulerError, match="requeue: disabled; submit the job again to go on"):
        Slurm().start_again("7", exclude=())
    answers["show"] = "JobState=PENDING RunTime=0 Reason=BeginTime"
    assert Slurm().start_again("7", exclude=("n2",)) == "job 7 requeued without n2"


def test_all_steps_but_the_batch_step_are_killed(said):
    given, answers = said
    answers |= {"squeue": "7.0\n7.batch\n7.1\n7.extern\n", "scancel": failing("it has ended")}
    Slurm().end_steps("7")
    assert given[1:] == [("scancel", "--signal=KILL", step) for step in ("7.0", "7.1")]
