"""`TITAN_LOOP_REQUIRE`: what is required must run; run on a small project with our conftest."""

import os
import tomllib
from pathlib import Path

import pytest

from tests.conftest import MARKERS
from tests.support.inner_session import run_inner_session
from tests.support.multiprocess import preloaded_context

ROOT = Path(__file__).resolve().parents[2]

SKIPPED = """
import pytest
@pytest.mark.slurm
def test_needs_a_cluster():
    pytest.skip("no controller")
"""
PASSED = """
import pytest
@pytest.mark.slurm
def test_has_a_cluster():
    pass
def test_plain():
    pass
"""


def run_session(folder: Path, text: str, **environment: str) -> tuple[int | None, str]:
    """Return the exit code and the output of a session on a project of one file."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_sample.py").write_text(text)
    markers = "\n".join(f"    {name}: sample" for name in MARKERS)
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TITAN_LOOP_")}
    output = folder / "output.txt"
    session = preloaded_context().Process(
        target=run_inner_session, args=(folder, clean | environment, output)
    )
    session.start()
    session.join(120)
    return session.exitcode, output.read_text()


def test_the_known_markers_are_those_of_pyproject():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert tuple(line.split(":")[0] for line in settings["markers"]) == MARKERS


@pytest.mark.parametrize(
    ("text", "required", "options", "code", "expected"),
    [
        (PASSED, "slurm,network", "", 1, "FAILED network: required, but no such test ran"),
        (PASSED, "slrum", "", 4, "TITAN_LOOP_REQUIRE=slrum is no marker"),
        (SKIPPED + PASSED, "slurm", "-n 1", 1, "but slurm is required here"),
    ],
    ids=[
        "none collected",
        "unknown marker",
        "a required skip fails in a worker",
    ],
)
def test_sessions(tmp_path, text, required, options, code, expected):
    got, output = run_session(tmp_path, text, TITAN_LOOP_REQUIRE=required, PYTEST_ADDOPTS=options)
    assert got == code, output
    assert expected in output
    if "-n" in options:  # the markers travelled with the reports
        assert "slurm          1 failed, 1 passed" in output
