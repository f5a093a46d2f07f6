"""tools/constraints beside pyproject.toml, and tools/setup.sh with an interpreter that pretends."""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
CONSTRAINTS = sorted((CHECKOUT / "tools/constraints").glob("py3*.txt"))
APART = {"engines", "float8", "hf4", "hf5", "hf5-no-deps", "mlx", "onnx", "vllm"}
"""Groups that exclude each other, each for an environment of its own."""


def requirements() -> Iterator[Requirement]:
    """Every requirement of the main environment, but torch, which depends on the machine."""
    project = PYPROJECT["project"]
    groups = PYPROJECT["dependency-groups"]
    for lines in (
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *(lines for name, lines in groups.items() if name not in APART),
    ):
        yield from (each for each in map(Requirement, lines) if each.name != "torch")


def test_every_supported_python_has_its_constraints():
    assert [path.stem for path in CONSTRAINTS] == ["py311", "py312", "py313", "py314"]
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_every_requirement_within_its_bounds(path):
    pins = dict(line.split("==") for line in path.read_text().splitlines())
    python = f"3.{path.stem.removeprefix('py3')}"
    for requirement in requirements():
        if requirement.marker is None or requirement.marker.evaluate(
            {"python_version": python, "platform_system": "Linux"}
        ):
            name = canonicalize_name(requirement.name)
            assert name in pins, f"{name}: run tools/constraints.sh"
            assert requirement.specifier.contains(pins[name]), f"{name}: run tools/constraints.sh"


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_leave_out_what_is_not_a_wheel_and_what_depends_on_the_machine(path):
    names = {line.partition("==")[0] for line in path.read_text().splitlines()}
    assert not names & {"torch", "word2number", "sqlitedict"}
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]


def test_scripts_that_test_or_check_install_the_packages_for_it():
    for path in sorted((CHECKOUT / "tools").glob("*.sh")):
        text = path.read_text()
        tests = "-m pytest" in text or "bin/ruff" in text
        assert ("\nset_up_tests\n" in text) == tests, path.name


PRETENDING_PYTHON = """#!/usr/bin/env bash
# Everything succeeds, but the downloads fail that `failures` counts, in pip's words of `words`.
case "$*" in
*"-m pip install"*)
    echo "$*" >>"$PRETENCE/installed"
    if [ -s "$PRETENCE/failures" ] && [ "$(cat "$PRETENCE/failures")" -gt 0 ]; then
        echo $(($(cat "$PRETENCE/failures") - 1)) >"$PRETENCE/failures"
        cat "$PRETENCE/words"
        exit 1
    fi
    ;;
*"dependency-groups"*) echo "of-${@: -1}" ;;
esac
"""


@pytest.fixture
def set_up(tmp_path):
    """Return a function that runs a script after `source tools/setup.sh` in a small checkout."""
    checkout = tmp_path / "checkout"
    shutil.copytree(CHECKOUT / "tools", checkout / "tools")
    shutil.copy(CHECKOUT / "pyproject.toml", checkout)
    programs = tmp_path / "programs"
    environment = tmp_path / "environment"
    for path, text in (
        (environment / "bin/python", PRETENDING_PYTHON),
        (programs / "sleep", "#!/bin/sh\n"),
        (programs / "nvidia-smi", "#!/bin/sh\nexit 1\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(script: str = "", failures: int = 0, words: str = "") -> subprocess.CompletedProcess:
        (tmp_path / "installed").write_text("")
        (tmp_path / "failures").write_text(f"{failures}\n")
        (tmp_path / "words").write_text(words)
        return subprocess.run(
            ["bash", "-c", f"set -euo pipefail; source tools/setup.sh; {script}"],
            cwd=checkout,
            env=os.environ
            | {
                "TITAN_LOOP_VENV": str(environment),
                "PRETENCE": str(tmp_path),
                "PATH": f"{programs}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def installed(tmp_path: Path) -> list[str]:
    return (tmp_path / "installed").read_text().splitlines()


def test_set_up_installs_wheels_in_constrained_versions_and_tests_apart(set_up, tmp_path):
    assert set_up().returncode == 0
    base = installed(tmp_path)
    assert base[-1].endswith("-e .")
    assert not any("of-dev" in line for line in base)
    assert set_up("set_up_tests").returncode == 0
    assert [line.split("constraints.txt ")[1] for line in installed(tmp_path)] == [
        "of-dev",
        "--no-deps of-no-deps",
    ]
    for line in base + installed(tmp_path):
        assert "--only-binary=:all:" in line
        assert f"-c {tmp_path}/environment/constraints.txt" in line


def test_set_up_does_nothing_again_until_pyproject_or_constraints_change(set_up, tmp_path):
    set_up("set_up_tests")
    assert installed(tmp_path)
    again = set_up("set_up_tests")
    assert (again.stdout, installed(tmp_path)) == ("", [])
    with (tmp_path / "checkout/tools/constraints/py311.txt").open("a") as file:
        file.write("six==1.0\n")
    set_up("set_up_tests")
    assert len(installed(tmp_path)) == 3


def test_a_download_that_breaks_off_is_tried_again_and_said_in_one_line(set_up, tmp_path):
    broken = "urllib3.exceptions.ProtocolError: Connection broken: IncompleteRead(3 bytes read)\n"
    answer = set_up(failures=2, words="Collecting numpy\n" + broken)
    assert answer.returncode == 0, answer.stderr
    assert [line for line in answer.stdout.splitlines() if "a download failed" in line] == [
        f"set-up: titan_loop and dependencies  a download failed, trying again: {broken.strip()}"
    ] * 2
    assert len(installed(tmp_path)) == 3


def test_a_network_that_stays_away_ends_set_up_with_one_line(set_up, tmp_path):
    answer = set_up(failures=9, words="ERROR: HTTP error 503 while getting https://index/numpy\n")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "downloads failed three times, at last with" in line
    assert "HTTP error 503" in line
    assert len(installed(tmp_path)) == 3
    assert set_up().returncode == 0, "nothing was stamped"
