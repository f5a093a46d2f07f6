"""Analysis: what a person looks at, drawn from a run directory alone.

metrics.jsonl, evals/depth-step-N.json ─► tables (text), plots (PNG)
"""
