"""Fixtures of analyses: a run with one checkpoint, written without training."""

from tests.evaluation.conftest import text_run
from tests.inference.conftest import own_run, trained_run

__all__ = ["own_run", "text_run", "trained_run"]
