"""Checkpoints: written and found by `LoopCheckpointManager`, over torchtitan's DCP manager.

Nothing is imported by this package itself, so that command lines start fast: import the modules.
"""
