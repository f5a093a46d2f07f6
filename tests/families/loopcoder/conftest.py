"""Runs of LoopCoder with random weights."""

import pytest

from tests.support.llama_runs import Make, ascii_tokenizer, maker  # noqa: F401
from titan_loop.families.loopcoder.model import LoopCoderOptions


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return the maker of LoopCoder's models."""
    return maker(LoopCoderOptions, tmp_path_factory)
