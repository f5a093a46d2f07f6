"""Evaluation: numbers a reader can compare, with their uncertainty.

held-out windows ─► nats per window and depth ─► bits_per_byte (intervals) ─┐
tokens the model has read ─► ngram_baselines (unigram, bigram) ─────────────┴─► depth_report
"""
