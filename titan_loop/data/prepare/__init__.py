"""From documents to prepared sources: read, clean, split, tokenise, shuffle, pack, verify."""
