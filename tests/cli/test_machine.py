"""What a machine offers a run: what blocks training, and what is only a warning."""

from pathlib import Path

import pytest
import torch

from titan_loop.cli import doctor as machine


@pytest.fixture(autouse=True)
def keep_this_process_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Finding out the threads of a run sets them; later tests must not run with what is tried here.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def texts(findings) -> str:
    return "\n".join(f"{finding.section} {finding.text}" for finding in findings)


def test_a_missing_temporary_folder_blocks_training(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    findings = list(machine.check_folders(tmp_path))
    assert [finding.blocks_training for finding in findings] == [False, True]


def test_half_an_environment_of_torchrun_blocks_training():
    (finding,) = machine.check_launcher({"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "x"})
    assert finding.blocks_training
    assert "RANK=1 is set without WORLD_SIZE, MASTER_PORT" in finding.text
    assert finding.fix is not None


SLURM_STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
    **{"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
}


def test_a_step_without_a_rendezvous_blocks_training():
    (finding,) = machine.check_launcher(SLURM_STEP)
    assert finding.blocks_training
    assert "MASTER_ADDR is not set" in finding.text


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
    assert expected in texts(machine.check_launcher(environment))


def test_threads_that_share_cores_are_a_warning(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    _, threads, *_ = machine.check_launcher({})
    assert threads.fix is not None
    assert "OMP_NUM_THREADS=" in threads.fix
    assert not threads.blocks_training


def test_no_compiler_is_a_warning(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (finding,) = machine.check_compiler()
    assert "no C++ compiler (CXX=no-such-compiler)" in finding.text
    assert "--compile.no-enable" in (finding.fix or "")


def test_a_version_out_of_bounds_blocks_training(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy>=99", "absent-x>=1"])
    wrong = {finding.section: finding for finding in machine.check_versions() if finding.fix}
    assert set(wrong) == {"numpy", "absent-x"}
    assert wrong["numpy"].fix == "pip install 'numpy>=99'"
    assert all(finding.blocks_training for finding in wrong.values())


def test_little_room_is_a_warning(monkeypatch):
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    disk, _ = machine.check_room(Path())
    assert disk.fix is not None
    assert not disk.blocks_training
