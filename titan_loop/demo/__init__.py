"""Corpora built from the Python installation itself, for the quick start and the tests."""
