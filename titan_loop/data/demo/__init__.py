"""Real text without a network: corpora made of the Python installation itself."""
