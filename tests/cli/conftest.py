"""Fixtures of the verbs: a run with one checkpoint, written without training."""

from tests.inference.conftest import trained_run  # noqa: F401
