"""Files that an exported folder holds for transformers beside nanbeige's; not imported here."""
