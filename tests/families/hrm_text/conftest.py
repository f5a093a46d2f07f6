"""Runs of HRM-Text with random weights."""

import pytest

from tests.support.llama_runs import Make, ascii_tokenizer, maker  # noqa: F401
from titan_loop.families.hrm_text.model import HrmTextOptions


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return the maker of HRM-Text's models."""
    return maker(HrmTextOptions, tmp_path_factory)
