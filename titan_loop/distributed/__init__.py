"""A looped decoder on several devices: placements, recomputation, compilation, FSDP2."""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
