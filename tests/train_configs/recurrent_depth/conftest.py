"""Fixtures of the study's analyses: a run on text with one checkpoint, written without training."""

from tests.inference.conftest import own_run, trained_run

__all__ = ["own_run", "trained_run"]
