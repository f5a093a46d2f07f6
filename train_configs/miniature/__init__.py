"""Ouro's recipe in miniature: every kind of stage, on one machine without a GPU."""
