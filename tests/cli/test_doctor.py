"""`titan-loop doctor`: all sections, and a fix for everything that is wrong."""

import os

import pytest
import torch

from titan_loop import compat
from titan_loop.cli import doctor, main

SLURM_STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
    **{"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
}
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


@pytest.fixture(autouse=True)
def keep_this_process_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Finding out the threads of a run sets them; later tests must not run with what is tried here.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_the_report_has_every_section_and_creates_nothing(capsys, tmp_path):
    code = main.main(["doctor", "--run-directory", str(tmp_path / "runs")])
    output = capsys.readouterr().out
    assert code == 0, output
    sections = "python torch torchtitan triton datatrove device launcher threads compiler"
    for section in (*sections.split(), "run directory", "temporary", "disk", "memory"):
        assert f"\n{section} " in f"\n{output}"
    assert "problems found: " in output
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_below_a_file_blocks_training(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main.main(["doctor", "--run-directory", str(tmp_path / "file" / "run")]) == 1
    output = capsys.readouterr().out
    problem = f"{tmp_path}/file cannot be written (Not a directory)"
    assert f"- run directory (blocks training): {problem}" in output
    assert "fix: give another --dump-folder" in output


@pytest.mark.parametrize(
    ("environment", "expected", "blocks"),
    [
        ({}, "none: rank 0 of 1, 1 on this host", False),
        (
            {**SLURM_STEP, "MASTER_ADDR": "first-node", "MASTER_PORT": "1234"},
            "SLURM job 7: rank 3 of 4, 2 on this host",
            False,
        ),
        (
            {**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun: rank 1 of 2, 2 on this host",
            False,
        ),
        (SLURM_STEP, "MASTER_ADDR is not set", True),
        (TORCHRUN, "RANK=1 is set without WORLD_SIZE", True),
    ],
    ids=["alone", "SLURM", "torchrun", "half of SLURM", "half of torchrun"],
)
def test_the_launcher_is_recognised(environment, expected, blocks):
    finding = next(doctor.check_launcher(environment))
    assert expected in finding.text
    assert finding.blocks_training == blocks == bool(finding.fix)


def test_what_is_tight_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    pages = {"SC_PAGE_SIZE": 1, "SC_AVPHYS_PAGES": 10**9}
    monkeypatch.setattr("os.sysconf", pages.get)
    _, threads = doctor.check_launcher({})
    _, compiler = doctor.check_device()
    _, _, disk, memory = doctor.check_machine(tmp_path)
    for finding, text in (
        (threads, "4096 per rank, 1 on this host, "),
        (compiler, "no C++ compiler (CXX=no-such-compiler)"),
        (disk, "1.0 GB free"),
        (memory, "1.0 GB free"),
    ):
        assert text in finding.text
        assert finding.fix
        assert not finding.blocks_training


def test_a_version_out_of_bounds_blocks_training(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy>=99", "absent-x>=1"])
    wrong = {finding.section: finding for finding in doctor.check_versions() if finding.fix}
    assert set(wrong) == {"numpy", "absent-x"}
    assert wrong["numpy"].fix == "pip install 'numpy>=99'"
    assert all(finding.blocks_training for finding in wrong.values())


def test_gpus_are_counted_and_more_ranks_than_gpus_block_training(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    assert next(doctor.check_device()).text == "2 × H100, NCCL, bfloat16"
    for ranks, blocked in ((2, False), (3, True)):
        sizes = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
        findings = list(doctor.check_launcher(TORCHRUN | sizes))
        assert any(found.blocks_training for found in findings) == blocked
    assert findings[-1].text == "3 ranks on this host share 2 GPUs"
