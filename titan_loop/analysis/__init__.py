"""Analysis: tables, plots and pages for people, drawn from a run directory alone.

metrics.jsonl, evals/tasks-step-N.json ─► tables (text), plots (PNG), report.html
"""
