"""transformers, llama.cpp and MLX, in the environments that scripts in tools/ make."""

import importlib
import os
from importlib import metadata
from types import ModuleType

import pytest

from tests.families.ouro.hugging_face.conftest import tokenizer_file  # noqa: F401


@pytest.fixture(
    scope="session",
    params=[pytest.param(4, marks=pytest.mark.hf4), pytest.param(5, marks=pytest.mark.hf5)],
    ids=["transformers4", "transformers5"],
)
def transformers(request: pytest.FixtureRequest) -> ModuleType:
    """Return transformers of one major version; `tools/test_hf.sh` makes environments with it."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = "0"
    if int(version.split(".")[0]) != request.param:
        pytest.skip(f"needs transformers {request.param}, see tools/test_hf.sh")
    return importlib.import_module("transformers")


@pytest.fixture(scope="session")
def python() -> str:
    """Return the Python that has llama.cpp."""
    return _python_with("xllamacpp", "TITAN_LOOP_ENGINES_PYTHON")


@pytest.fixture(scope="session")
def mlx_python() -> str:
    """Return the Python that has MLX."""
    return _python_with("mlx-lm", "TITAN_LOOP_MLX_PYTHON")


def _python_with(package: str, variable: str) -> str:
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"needs {package} in an environment of its own, see tools/test_engines.sh")
    return found
