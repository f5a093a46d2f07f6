"""Scaling laws: runs, or a CSV file ─► data ─► law, fit ─► study (hold-outs, choice, plot)."""
