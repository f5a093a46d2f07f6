"""Runs of Llama's blocks, and a tokenizer of ASCII."""

from tests.support.llama_runs import ascii_tokenizer, make_run, unsplit_tokenizer  # noqa: F401
