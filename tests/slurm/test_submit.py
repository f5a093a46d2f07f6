"""What `slurm submit` prints, and refuses before anything is submitted; needs no SLURM."""

import shlex

import pytest

from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.slurm import memory_check, submit
from titan_loop.slurm.site import Site, source_site

RECIPE = "tests.slurm.recipes:two_stages"
FLAGS = ("--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", "--time=1:00:00")


@pytest.fixture(autouse=True)
def a_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "TITAN_LOOP_NETWORK_INTERFACE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *arguments: str) -> str:
    assert main(["slurm", "submit", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("name", "instead"), [("SBATCH_TIMELIMIT", "--time"), ("SBATCH_OPEN_MODE", "")]
)
def test_variables_that_would_override_the_script_are_refused(capsys, monkeypatch, name, instead):
    monkeypatch.setenv(name, "9")
    said = refused(capsys, RECIPE, *FLAGS, "--dry-run")  # sbatch may be missing here
    assert f"{name}=9 would override what submit writes; unset it" in said
    assert f"and give {instead}" in said or not instead


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


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--nodes=0",), "--nodes=0 must be at least 1"),
        (("--time=soon",), "--time=soon is not a time limit"),
        (("--time=6:00",), "--time=6:00 leaves nothing to train in"),
        (("--save-seconds=0",), "--save-seconds=0 must be at least 1"),
        (("--gpus-per-node=4", "--ranks-per-node=8"), "--ranks-per-node=8 is more than the 4 GPUs"),
        (("--nodes=3",), "stage first: a global batch of 4 windows does not divide"),
        (("--stage=third",), "recipe two_stages has no stage 'third'"),
        (("--stage=second",), "stage second starts from first, which has 0 of"),
        (("--site=nowhere.sh",), "--site=nowhere.sh is not a file"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(capsys, flags, complaint):
    assert complaint in refused(capsys, RECIPE, *FLAGS, "--dry-run", *flags)


def test_cpus_memory_gpus_and_mail_reach_the_script(tmp_path, capsys):
    site = tmp_path / "site.sh"
    site.write_text("export TITAN_LOOP_SBATCH_FLAGS='--exclusive --mem=0 --constraint=\"a&b\"'\n")
    flags = ("--nodes=1", "--gpus-per-node=a100:2", "--time=1:00:00", "--dry-run")
    more = ("--site", str(site), "--sbatch", "--qos=long")
    # Of a machine with GPUs, which this one is not.
    gpu_only = ("--profiler.enable-memory-snapshot", "--model.attention=varlen")
    assert main(["slurm", "submit", RECIPE, *flags, *more, *gpu_only]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    for directive in (
        "--gpus-per-node=a100:2",
        "--ntasks-per-node=2",
        "--exclusive",
        "--mem=0",
        "'--constraint=a&b'",
        "--qos=long",
    ):
        assert f"#SBATCH {directive}" in lines, directive
    assert "nothing asks for CPUs" not in captured.err
    gres = ("--site", str(site), "--sbatch=--gres=gpu:a100:2 --mail-type=END,FAIL")
    assert main(["slurm", "submit", RECIPE, *flags, *gres]) == 0
    script = capsys.readouterr().out.partition("exec ")[0]
    assert "gpus-per-node" not in script
    assert "#SBATCH --mail-type=END,FAIL" in script.splitlines()


def test_a_job_that_would_get_one_cpu_is_remarked(capsys):
    assert main(["slurm", "submit", RECIPE, *FLAGS, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "no site file" in said
    assert "nothing asks for CPUs, memory or whole nodes" in said


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--sbatch=-p gpu",), "has '-p'; write every flag of sbatch as --NAME or --NAME=VALUE"),
        (("--sbatch=--time=1",), "has --time=1, which submit sets itself; use --time"),
        (("--gpus-per-node=many",), "--gpus-per-node=many is not a number or TYPE:NUMBER"),
        (("--sbatch=--a='",), "No closing quotation"),
        (
            ("--model.attention=varlen",),
            "model.attention=varlen needs CUDA",
        ),
    ],
)
def test_wrong_resources_are_refused(capsys, flags, complaint):
    assert complaint in refused(capsys, RECIPE, *FLAGS, "--dry-run", *flags)


def test_what_is_missing_is_said(capsys, monkeypatch):
    assert "unknown recipe 'nonesuch'" in refused(capsys, "nonesuch", *FLAGS, "--dry-run")
    assert "add --ranks-per-node" in refused(
        capsys, RECIPE, "--nodes=1", "--gpus-per-node=0", "--time=1:00:00"
    )
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "sbatch is not on PATH" in refused(capsys, RECIPE, *FLAGS)


def test_a_stage_that_fits_no_gpu_is_refused_and_one_that_hardly_does_is_remarked(
    capsys, monkeypatch
):
    def said(gpus: str) -> str:
        flags = [f"--gpus-per-node={gpus}", "--dry-run"]
        main(["slurm", "submit", RECIPE, "--nodes=2", "--time=1:00:00", *flags])
        return capsys.readouterr().err

    assert "memory was not checked: no kind of GPU is named" in said("1")
    assert "memory was not checked: the GPU rtx9 is unknown" in said("rtx9:1")
    plan = f"peak memory is unknown for first, second; titan-loop plan {RECIPE} --nodes 2"
    assert plan in said("h100:1")  # the name that `plan` takes, not the recipe's own
    peaks = {"first": 75 * 2**30, "second": 20 * 2**30}
    monkeypatch.setattr(memory_check, "known_peak_bytes", lambda needs, _: peaks[needs.name])
    hardly = said("h100:1")
    assert "titan-loop: stage first needs 75 GiB of the 79 GiB of a h100; titan-loop plan" in hardly
    assert "second needs" not in hardly
    peaks["first"] = 109 * 2**30
    assert "error: stage first needs 109 GiB of the 79 GiB of a h100; titan" in said("h100:1")


def test_outside_of_a_cluster_verbs_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["slurm", "run", RECIPE, "--dump-folder", str(tmp_path)]) == 2
    assert "slurm run is for batch scripts" in capsys.readouterr().err
    for verb in ("status", "cancel"):
        assert main(["slurm", verb, str(tmp_path)]) == 2
        assert f"{tmp_path} has no jobs" in capsys.readouterr().err


def test_a_site_file(tmp_path, capsys):
    site = tmp_path / "site.sh"
    site.write_text(
        "export TITAN_LOOP_CONTAINER='apptainer exec \"my image.sif\"'\n"
        "export TITAN_LOOP_NETWORK_INTERFACE=ib0\n"
    )
    found = Site.of(source_site(site, {"PATH": "/usr/bin:/bin"}))
    assert found == Site(container=("apptainer", "exec", "my image.sif"), network_interface="ib0")
    site.write_text("export TITAN_LOOP_CONTAINR=x\n")
    flags = (*FLAGS, "--dry-run", "--site", str(site))
    assert "TITAN_LOOP_CONTAINR, which is not a setting; nearest" in refused(capsys, RECIPE, *flags)
    site.write_text("echo no such module >&2; false\n")
    assert "fails (no such module); fix it" in refused(capsys, RECIPE, *flags)
    site.write_text("export TITAN_LOOP_SRUN_FLAGS='\"half'\n")
    assert "No closing quotation" in refused(capsys, RECIPE, *flags)


def test_a_job_may_fit_any_partition_of_a_list(monkeypatch):
    limits = {"small": ("2", "1:00:00"), "large": ("8", "UNLIMITED")}

    def show(kind: str, name: str) -> dict[str, str]:
        nodes, time = limits[name]
        return {
            "PartitionName": name,
            "TotalNodes": nodes,
            "MaxNodes": "UNLIMITED",
            "MaxTime": time,
        }

    monkeypatch.setattr(submit, "slurm", lambda *command: "small*\nlarge\n")
    monkeypatch.setattr(submit, "show", show)

    def check(partitions: str, *, nodes: int, time: str = "2:00:00") -> None:
        resources = submit.Resources(
            nodes=nodes, ranks_per_node=1, gpus_per_node=0, time=time, save_seconds=300
        )
        submit._check_cluster(resources, partitions)

    check("small,large", nodes=4)
    check("large", nodes=8)
    check("", nodes=2, time="30:00")
    with pytest.raises(UserError, match="--nodes=9 is more than the 2 that partition small gives"):
        check("small,large", nodes=9)
    with pytest.raises(UserError, match="--time=2:00:00 is more than partition small allows"):
        check("", nodes=1)
    with pytest.raises(UserError, match="SBATCH_PARTITION=lage does not exist; nearest: large"):
        check("small,lage", nodes=1)
