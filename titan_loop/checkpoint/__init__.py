"""Checkpoints: written and found by `LoopCheckpointManager`, over torchtitan's DCP manager."""
