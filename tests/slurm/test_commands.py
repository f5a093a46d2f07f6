"""SLURM's commands, stood in for by scripts on PATH, and their answers as Python values."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.slurm import commands
from titan_loop.slurm.chain import cancel_chain, read_chain
from titan_loop.slurm.commands import (
    CommandFailedError,
    host_names,
    outside_of_a_job,
    parse_seconds,
    show,
    slurm,
)
from titan_loop.slurm.record import write_jobs


@pytest.fixture
def script(tmp_path: Path, monkeypatch) -> Callable[[str], None]:
    """Write the `scontrol` that PATH leads to."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(text: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "scontrol").chmod(0o755)

    return write


def test_fields_may_have_spaces(script):
    script(
        'echo "JobId=7 JobName=a b  Command=/x y.sh --flag=1 ExcNodeList=(null) '
        'TRES:x/y=cpu=4 Comment=\n"; echo "JobId=8"'
    )
    assert show("job", "7") == {
        "JobId": "7",
        "JobName": "a b",
        "Command": "/x y.sh --flag=1",
        "ExcNodeList": "(null)",
        "TRES:x/y": "cpu=4",
        "Comment": "",
    }


def test_names_of_hosts(script):
    script('[ "$3" = "n[1-2]" ] && printf "n1\nn2\n"')
    assert host_names("n[1-2]") == ["n1", "n2"]
    assert host_names("") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo no such >&2; echo job >&2; exit 1", "scontrol show: no such job"),
        ("echo on stdout; exit 1", "scontrol show: on stdout"),
        ("exit 3", "scontrol show: code 3"),
    ],
)
def test_a_failure_is_one_line(script, text, said):
    script(text)
    with pytest.raises(CommandFailedError) as caught:
        slurm("scontrol", "show", "job")
    assert str(caught.value) == said


def test_a_command_gets_the_environment_it_is_given(script):
    script('echo "$ONLY$OTHER"')
    environment = {"PATH": os.environ["PATH"], "ONLY": "x"}
    assert slurm("scontrol", environment=environment) == "x\n"


def test_a_command_that_hangs_or_is_not_there(script, monkeypatch):
    script("exec sleep 60")
    monkeypatch.setattr(commands, "_SECONDS", 0.05)
    with pytest.raises(CommandFailedError, match=r"scontrol did not answer within 0\.05 s"):
        slurm("scontrol")
    with pytest.raises(UserError, match="nonesuch is not on PATH; run this on a node"):
        slurm("nonesuch")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:01", 7201),
        ("1-0", 86_400),
        ("1-2:30", 95_400),
        ("1-02:30:05", 95_405),
    ],
)
def test_time_limits_as_sbatch_reads_them(text, seconds):
    assert parse_seconds(text) == seconds


def test_a_new_job_is_not_told_it_is_this_one():
    environment = {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "2", "SLURM_CONF": "c", "HOME": "h"}
    assert outside_of_a_job(environment) == {"SLURM_CONF": "c", "HOME": "h"}
    environment = {"SLURMD_NODENAME": "n", "SRUN_CPUS_PER_TASK": "2", "SLURMX": "kept"}
    assert outside_of_a_job(environment) == {"SLURMX": "kept"}


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-1", "1-", "1.5"])
def test_other_texts_are_not_time_limits(text):
    with pytest.raises(UserError, match="is not a time limit; write H:M:S or D-H:M:S"):
        parse_seconds(text)


AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_controller_out_of_reach_is_asked_again(script, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_WAITS", (0.0, 0.0))
    asked = tmp_path / "asked"

    def answer_after(failures: int) -> None:
        asked.write_text("")
        script(
            f"echo >> {asked}\n"
            f'[ "$(wc -l < {asked})" -le {failures} ] && {{ echo "{AWAY}" >&2; exit 1; }}\n'
            "echo JobId=7"
        )

    answer_after(2)
    assert show("job", "7") == {"JobId": "7"}
    answer_after(3)
    with pytest.raises(CommandFailedError, match="Unable to contact"):
        show("job", "7")
    assert asked.read_text() == "\n" * 3


def test_a_job_that_slurm_forgot_is_not_asked_for_again(script, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_WAITS", (60.0,))
    write_jobs(tmp_path, {"1a": "7"})
    script("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert [job.state for job in read_chain(tmp_path)] == ["GONE"]
    assert cancel_chain(tmp_path) == []


def test_jobs_of_an_unknown_state_are_not_gone(script, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_WAITS", ())
    write_jobs(tmp_path, {"1a": "7"})
    script(f"echo '{AWAY}' >&2; exit 1")
    with pytest.raises(CommandFailedError, match="Unable to contact"):
        cancel_chain(tmp_path)
