"""`titan-loop doctor`: all sections, and a fix for everything that is wrong."""

import pytest
import torch

from titan_loop.cli import main


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
    assert f"- run directory (blocks training): {tmp_path}/file/run: {tmp_path}/file is a file" in (
        output
    )
    assert "fix: give another --dump-folder" in output
