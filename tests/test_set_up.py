"""tools/constraints beside pyproject.toml."""

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
