"""`titan-loop doctor`: all sections, and a fix for everything that is wrong."""

import math
import subprocess
import sys

import pytest
import torch

from titan_loop.cli import main
from titan_loop.cli.doctor import start_finding


@pytest.fixture(autouse=True)
def keep_this_process_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Finding out the threads of a run sets them; later tests must not run with what is tried here.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_the_report_has_every_section(capsys, tmp_path):
    code = main.main(["doctor", "--run-directory", str(tmp_path / "runs")])
    output = capsys.readouterr().out
    assert code == 0, output
    for section in (
        *("python", "torch", "torchtitan", "triton", "datatrove", "start", "device", "precision"),
        *("SPMD backend", "launcher", "threads", "compiler", "run directory", "temporary"),
        *("disk", "memory", "problem"),
    ):
        assert f"\n{section} " in f"\n{output}" or section == "problem"
    assert "found" in output
    assert not (tmp_path / "runs").exists(), "looking must not create anything"


@pytest.mark.parametrize(
    ("wall", "processor", "fix"),
    [(29, 28, None), (40, 25, "the processor is slow or shared"), (40, 15, "the disk is slow")],
)
def test_a_slow_start_is_blamed_on_disk_or_processor(wall, processor, fix):
    finding = start_finding(wall, processor, 3e8)
    assert "300 MB read" in finding.text
    assert f"{wall - processor:.1f} on disk" in finding.text
    assert finding.fix is None if fix is None else finding.fix.startswith(fix)
    assert not finding.blocks_training
    assert "MB" not in start_finding(wall, processor, math.nan).text


def test_a_start_is_measured_in_a_process_that_has_imported_nothing():
    code = "from titan_loop.cli.doctor import check_start; print(*check_start())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    seconds = float(answer.partition("imports took ")[2].partition(" s")[0])
    processor = float(answer.partition(" s: ")[2].partition(" on ")[0])
    assert seconds > 0.1
    assert processor > 0.1


def test_a_run_directory_below_a_file_blocks_training(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main.main(["doctor", "--run-directory", str(tmp_path / "file" / "run")]) == 1
    output = capsys.readouterr().out
    problem = f"{tmp_path}/file/run: {tmp_path}/file cannot be written (Not a directory)"
    assert f"- run directory (blocks training): {problem}" in output
    assert "fix: give another --dump-folder" in output
