"""`titan-loop doctor`: all sections, and a fix for everything that is wrong.

What a machine offers a run either blocks training or is only a warning.
"""

import os
from pathlib import Path

import pytest
import torch

from titan_loop import compat
from titan_loop.cli import doctor, main
from titan_loop.cli.doctor import Finding

SLURM_STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
    **{"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
}


@pytest.fixture(autouse=True)
def keep_this_process_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Finding out the threads of a run sets them; later tests must not run with what is tried here.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_the_report_has_every_section(capsys, tmp_path):
    code = main.main(["doctor", "--run-directory", str(tmp_path / "runs")])
    output = capsys.readouterr().out
    assert code == 0, output
    for section in (
        *("python", "torch", "torchtitan", "triton", "datatrove", "device", "precision"),
        *("SPMD backend", "launcher", "threads", "compiler", "run directory", "temporary"),
        *("disk", "memory", "problem"),
    ):
        assert f"\n{section} " in f"\n{output}" or section == "problem"
    assert "found" in output
    assert not (tmp_path / "runs").exists(), "looking must not create anything"


def test_a_run_directory_below_a_file_blocks_training(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main.main(["doctor", "--run-directory", str(tmp_path / "file" / "run")]) == 1
    output = capsys.readouterr().out
    problem = f"{tmp_path}/file/run: {tmp_path}/file cannot be written (Not a directory)"
    assert f"- run directory (blocks training): {problem}" in output
    assert "fix: give another --dump-folder" in output


def texts(findings) -> str:
    return "\n".join(f"{finding.section} {finding.text}" for finding in findings)


def test_half_an_environment_of_torchrun_blocks_training():
    (finding,) = doctor.check_launcher(SLURM_STEP)
    assert finding.blocks_training
    assert "MASTER_ADDR is not set" in finding.text
    (finding,) = doctor.check_launcher({"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "x"})
    assert finding.blocks_training
    assert "RANK=1 is set without WORLD_SIZE, MASTER_PORT" in finding.text
    assert finding.fix is not None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "launcher none: rank 0 of 1, 1 on this host"),
        (
            {**SLURM_STEP, "MASTER_ADDR": "first-node", "MASTER_PORT": "1234"},
            "launcher SLURM job 7: rank 3 of 4, 2 on this host",
        ),
        (
            {
                **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"},
            },
            "launcher torchrun: rank 1 of 2, 2 on this host",
        ),
    ],
    ids=["alone", "SLURM", "torchrun"],
)
def test_the_launcher_is_recognised(environment, expected):
    assert expected in texts(doctor.check_launcher(environment))


def test_threads_that_share_cores_are_a_warning(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    _, threads, *_ = doctor.check_launcher({})
    assert threads.fix is not None
    assert "4096 per rank, 1 rank, " in threads.text
    assert "OMP_NUM_THREADS=" in threads.fix
    assert not threads.blocks_training
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    _, threads, *_ = doctor.check_launcher({})
    assert threads.fix is None


def test_no_compiler_is_a_warning(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (finding,) = doctor.check_compiler()
    assert "no C++ compiler (CXX=no-such-compiler)" in finding.text
    assert "--compile.no-enable" in (finding.fix or "")


def test_a_version_out_of_bounds_blocks_training(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy>=99", "absent-x>=1"])
    wrong = {finding.section: finding for finding in doctor.check_versions() if finding.fix}
    assert set(wrong) == {"numpy", "absent-x"}
    assert wrong["numpy"].fix == "pip install 'numpy>=99'"
    assert all(finding.blocks_training for finding in wrong.values())


def test_less_than_2_gb_of_room_is_a_warning(monkeypatch):
    for free, few in ((2 * 10**9, False), (2 * 10**9 - 1, True)):
        usage = type("Usage", (), {"free": free})
        pages = {"SC_PAGE_SIZE": 2, "SC_AVPHYS_PAGES": free / 2, "SC_PHYS_PAGES": 2 * 10**9}
        monkeypatch.setattr("shutil.disk_usage", lambda path, usage=usage: usage)
        monkeypatch.setattr("os.sysconf", pages.get)
        disk, memory = doctor.check_room(Path())
        assert [disk.fix is not None, memory.fix is not None] == [few, few]
        assert not disk.blocks_training
        assert not memory.blocks_training
        assert disk.text.startswith("2.0 GB free at ")
        assert memory.text == "2.0 GB free of 4.0 GB"


def test_gpus_are_counted_and_more_ranks_than_gpus_block_training(monkeypatch):
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    assert texts(doctor.check_devices()).splitlines()[:2] == [
        "device 2 × H100, NCCL",
        "precision bfloat16 mixed precision",
    ]
    launched = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for ranks, blocked in ((2, False), (3, True)):
        sizes = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
        findings = list(doctor.check_launcher(launched | sizes))
        assert any(found.blocks_training for found in findings) == blocked
        assert f"{ranks} ranks, " in texts(findings)
    assert "3 ranks on this host share 2 GPUs" in texts(findings)


@pytest.mark.parametrize(
    ("listed", "hidden", "cuda", "fix"),
    [
        ("No devices were found", "", None, "None"),
        ("GPU 0: H100", "", "13.0", "unset CUDA_VISIBLE_DEVICES"),
        ("GPU 0: H100", "-1", "13.0", "unset CUDA_VISIBLE_DEVICES"),
        ("GPU 0: H100", "0", None, "this machine has a GPU but torch is a CPU build"),
        ("GPU 0: H100", "0", "13.0", "torch was built for CUDA 13.0: upgrade the NVIDIA driver"),
    ],
)
def test_a_gpu_that_torch_does_not_see(listed, hidden, cuda, fix, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    device, precision, _ = doctor.check_devices()
    assert str(device.fix).startswith(fix)
    assert precision.text == "float32"
    program.unlink()
    assert next(doctor.check_devices()).fix is None


@pytest.mark.parametrize(
    ("blocks", "code", "lines"),
    [
        ([], 0, ["0 problems found"]),
        ([False], 0, ["1 problem found", "- start (warning): slow", "  fix: mend it"]),
        ([True, False], 1, ["2 problems found", "- start (blocks training): slow"]),
    ],
)
def test_only_a_problem_that_blocks_training_is_a_failure(blocks, code, lines, monkeypatch, capsys):
    for name in ("versions", "devices", "launcher", "compiler", "folders", "room"):
        monkeypatch.setattr(doctor, f"check_{name}", lambda *given: [])
    findings = [Finding("start", "slow", "mend it", blocks_training=each) for each in blocks]
    monkeypatch.setattr(doctor, "check_versions", lambda: [Finding("python", "3.12"), *findings])
    assert main.main(["doctor"]) == code
    printed = capsys.readouterr().out.splitlines()
    assert printed[len(blocks) + 2 :][: len(lines)] == lines
