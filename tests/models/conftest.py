"""Runs of Llama's blocks."""

from tests.support.llama_runs import make_run  # noqa: F401
