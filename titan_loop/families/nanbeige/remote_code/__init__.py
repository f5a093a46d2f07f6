"""Files that an exported folder holds for transformers; not imported here."""
