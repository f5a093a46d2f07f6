"""From prepared sources to batches: windows, mixtures, their order, and the proof of it."""
