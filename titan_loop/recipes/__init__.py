"""Finds, checks and trains recipes, which are lists of stages defined in `train_configs`."""
