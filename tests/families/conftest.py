"""transformers, llama.cpp and MLX, in the environments that scripts in tools/ make."""

import importlib
import os
import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from tests.families.ouro.hugging_face.conftest import tokenizer_file  # noqa: F401
from titan_loop.formats import llama_cpp


@pytest.fixture(
    scope="session",
    params=[pytest.param(4, marks=pytest.mark.hf4), pytest.param(5, marks=pytest.mark.hf5)],
    ids=["transformers4", "transformers5"],
)
def transformers(request: pytest.FixtureRequest) -> ModuleType:
    """Return transformers of one major version; `tools/test_hf.sh` makes environments with it."""
    return _transformers_of(request.param)


@pytest.fixture(scope="session")
def transformers5() -> ModuleType:
    """Return transformers 5, for models that version 4 lacks."""
    return _transformers_of(5)


def _transformers_of(major: int) -> ModuleType:
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = "0"
    if int(version.split(".")[0]) != major:
        pytest.skip(f"needs transformers {major}, see tools/test_hf.sh")
    return importlib.import_module("transformers")


@pytest.fixture(scope="session")
def python() -> str:
    """Return the Python that has llama.cpp."""
    return _python_with("xllamacpp", "TITAN_LOOP_ENGINES_PYTHON")


@pytest.fixture
def wheel(python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return llama.cpp's library, of a wheel that this process finds for the time of a test."""
    find = "import xllamacpp; print(xllamacpp.__file__)"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    monkeypatch.syspath_prepend(Path(found.stdout.strip()).parents[1])
    library = llama_cpp.library()
    assert library is not None
    return library


@pytest.fixture(scope="session")
def mlx_python() -> str:
    """Return the Python that has MLX."""
    return _python_with("mlx-lm", "TITAN_LOOP_MLX_PYTHON")


@pytest.fixture(scope="session")
def quantiser() -> str:
    """Return the folder of llama.cpp's libraries that have its quantiser."""
    return _python_with("@node-llama-cpp/linux-x64", "TITAN_LOOP_QUANTISER")


def _python_with(package: str, variable: str) -> str:
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"needs {package} in an environment of its own, see tools/test_engines.sh")
    return found
