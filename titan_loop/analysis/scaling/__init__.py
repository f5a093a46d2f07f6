"""Scaling laws: measured losses to fitted coefficients.

runs, or a CSV file ─► data ─► law (forms, fits) ─► study (hold-outs, choice) ─► page
published laws ───────────────► law
"""
