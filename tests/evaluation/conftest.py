"""Fixtures of evaluation: runs whose one checkpoint was written without training."""

from pathlib import Path

import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.inference.conftest import (  # noqa: F401
    ended_run,
    own_run,
    run_of_the_readme,
    trained_run,
)


@pytest.fixture(autouse=True)
def quiet_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress bars, which start threads of their own."""
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="session")
def text_run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose source has held-out text; its checkpoint was never trained."""
    run = write_run_of(source, tmp_path_factory.mktemp("text") / "run")
    write_checkpoint_of(run, 3)
    return run
