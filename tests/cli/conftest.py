"""Fixtures of the command line: runs written without training."""

from tests.evaluation.conftest import text_run
from tests.inference.conftest import ended_run, own_run, trained_run

__all__ = ["ended_run", "own_run", "text_run", "trained_run"]
