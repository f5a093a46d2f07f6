"""Evaluation: numbers a reader can compare, with their uncertainty.

checkpoint ─► readings (depths, exit policies) ─► text, exam, harness ─┐
tokens the model has read ─► ngram_baselines (unigram, bigram) ────────┴─► task_report
"""
