"""transformers, in the environments that `tools/test_hf.sh` makes."""

import importlib
from importlib import metadata
from types import ModuleType

import pytest


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
