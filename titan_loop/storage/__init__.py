"""Files on disk: atomic writes, folders that appear whole or not at all, locks, local paths."""
