"""What `slurm submit` prints, and refuses before anything is submitted; needs no SLURM."""

import shlex

import pytest

from titan_loop.cli.main import main

RECIPE = "tests.launch.recipes:two_stages"
FLAGS = ("--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", "--time=1:00:00")


@pytest.fixture(autouse=True)
def a_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "TITAN_LOOP_NETWORK_INTERFACE"):
        monkeypatch.delenv(name, raising=False)


def test_a_dry_run_prints_a_script_a_stage(tmp_path, capsys):
    site = tmp_path / "site.sh"
    site.write_text(
        "echo loading modules\nexport SBATCH_PARTITION=gpu SBATCH_ACCOUNT='my project'\n"
    )
    flags = (*FLAGS, "--site", str(site), "--dump-folder", "runs", "--total-tokens", "1K")
    flags = (*flags, "activation-checkpoint:full", "--stages.second.max-skipped-steps", "3")
    assert main(["slurm", "submit", RECIPE, *flags, "--dry-run"]) == 0
    first, second = capsys.readouterr().out.split("# stage ")[1:]
    assert second.startswith("second, after first\n")
    # With its prefix, so that the job sets it after the flags for all stages, as `train` does.
    kept = "--total-tokens 1K activation-checkpoint:full --stages.second.max-skipped-steps 3"
    assert f"{kept} --dump-folder" in second
    lines = first.splitlines()
    for directive in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=1:00:00",
        "--partition=gpu",
        "--account='my project'",
        "--signal=B:USR1@300",
        f"--output={tmp_path}/runs/slurm/first.log",
        "--open-mode=append",
        "--kill-on-invalid-dep=yes",
    ):
        assert f"#SBATCH {directive}" in lines
    # Two commands and nothing else: whatever is decided, the command line decides.
    commands = [line for line in lines[1:] if line and not line.startswith("#")]
    assert commands[0] == f"source {site}"
    assert shlex.split(commands[1])[2:] == [
        *("-m", "titan_loop", "slurm", "run", RECIPE, "--total-tokens", "1K"),
        "activation-checkpoint:full",
        *(f"--dump-folder={tmp_path}/runs", "--stage=first", "--save-seconds=300"),
    ]
    assert len(commands) == 2
    assert not (tmp_path / "runs").exists()


def test_cpus_memory_gpus_and_mail_reach_the_script(tmp_path, capsys):
    site = tmp_path / "site.sh"
    site.write_text("export TITAN_LOOP_SBATCH_FLAGS='--exclusive --mem=0 --constraint=\"a&b\"'\n")
    flags = ("--nodes=1", "--gpus-per-node=a100:2", "--time=1:00:00", "--dry-run")
    # Of a machine with GPUs, which this one is not.
    gpu_only = ("--profiler.enable-memory-snapshot", "--model.attention=varlen")
    for sbatch, gpus in (
        ("--qos=long", True),
        ("--gres=gpu:a100:2 --mail-type=END,FAIL", False),
        ("--gres=nvme:1,gpu:2", False),
        ("--gres=lscratch:200 --gres-flags=enforce-binding", True),  # neither asks for a GPU
    ):
        more = ("--site", str(site), f"--sbatch={sbatch}", *gpu_only)
        assert main(["slurm", "submit", RECIPE, *flags, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        directives = ("--ntasks-per-node=2", "--exclusive", "--mem=0", "'--constraint=a&b'")
        for directive in (*directives, *sbatch.split()):
            assert f"#SBATCH {directive}" in lines, directive
        assert ("#SBATCH --gpus-per-node=a100:2" in lines) is gpus


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--nodes=0",), "--nodes=0 must be at least 1"),
        (("--time=soon",), "--time=soon is not a time limit"),
        (("--time=6:00",), "--time=6:00 leaves nothing to train in"),
        (("--save-seconds=0",), "--save-seconds=0 must be at least 1"),
        (("--gpus-per-node=4", "--ranks-per-node=8"), "--ranks-per-node=8 is more than the 4 GPUs"),
        (("--gpus-per-node=many",), "--gpus-per-node=many is not a number or TYPE:NUMBER"),
        (("--nodes=3",), "stage first: a global batch of 4 windows does not divide"),
        (("--stage=third",), "recipe two_stages has no stage 'third'"),
        (("--stage=second",), "stage second starts from first, which has 0 of"),
        (("--site=nowhere.sh",), "--site=nowhere.sh is not a file"),
        (("--sbatch=-p gpu",), "has '-p'; write every flag of sbatch as --NAME or --NAME=VALUE"),
        (("--sbatch=--time=1",), "has --time=1, which submit sets itself"),
        (("--sbatch=--a='",), "No closing quotation"),
        (("--model.attention=varlen",), "model.attention=varlen needs CUDA"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(capsys, flags, complaint):
    assert main(["slurm", "submit", RECIPE, *FLAGS, "--dry-run", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("error:") == 1


def test_what_is_missing_is_said(capsys, tmp_path, monkeypatch):
    def said(*arguments: str) -> str:
        assert main(["slurm", *arguments]) == 2
        return capsys.readouterr().err

    gpus = ("--nodes=1", "--gpus-per-node=0", "--time=1:00:00")
    assert "add --ranks-per-node" in said("submit", RECIPE, *gpus)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "sbatch is not on PATH" in said("submit", RECIPE, *FLAGS)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "slurm run is for batch scripts" in said("run", RECIPE, f"--dump-folder={tmp_path}")
    assert f"{tmp_path / 'x'} has no jobs" in said("cancel", str(tmp_path / "x"))


def test_a_job_without_an_answer_is_not_said_to_be_absent(tmp_path, capsys, monkeypatch):
    """SLURM may have queued it all the same; the jobs before it are cancelled."""
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    for name, body in {
        "sbatch": f'case "$*" in *afterok*) echo "{lost}" >&2; exit 1;; esac; echo 7',
        "scancel": f'echo "$*" >"{tmp_path}/cancelled"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["slurm", "submit", RECIPE, *FLAGS, f"--dump-folder={tmp_path}/runs"]) != 0
    assert f"{lost}); nothing else is queued" in capsys.readouterr().err
    assert (tmp_path / "cancelled").read_text() == "7\n"
