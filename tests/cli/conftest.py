"""Fixtures of the verbs: a run with one checkpoint, written without training."""

from tests.inference.conftest import ended_run, own_run, trained_run  # noqa: F401
