"""Files that an exported folder holds for vLLM and SGLang; not imported here."""
