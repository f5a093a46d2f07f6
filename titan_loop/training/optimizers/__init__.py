"""Optimisers: a file each, and the container of those that a run uses."""
