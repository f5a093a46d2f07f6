"""Recipes: lists of stages, found by name and run. They are defined in `train_configs`."""
