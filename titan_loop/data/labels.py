"""The label of a position without a target, torchtitan's IGNORE_INDEX without importing torch."""

IGNORED = -100
