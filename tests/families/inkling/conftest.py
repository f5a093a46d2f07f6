"""Runs of Inkling with random weights."""

from typing import Any

import pytest

from tests.families.inkling.contract import SMALL
from tests.support.llama_runs import Make, ascii_tokenizer, maker  # noqa: F401
from titan_loop.families.inkling.model import InklingOptions


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return the maker of Inkling's models."""
    kind: Any = InklingOptions
    make = maker(kind, tmp_path_factory)
    return lambda **options: make(**{**SMALL, **options})
