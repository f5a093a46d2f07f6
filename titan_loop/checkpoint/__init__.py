"""Checkpoints: written and found by `LoopCheckpointManager`, over torchtitan's DCP manager."""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
