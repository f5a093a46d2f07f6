"""Fixtures of Ouro's analyses: a run with one checkpoint, written without training."""

from tests.inference.conftest import own_run, trained_run  # noqa: F401
