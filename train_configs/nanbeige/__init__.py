"""Looped Llama blocks on the quick start's corpus: a model that inference engines run."""
