"""Inkling-2-Mini's shape, and its passes in miniature."""
