"""Recipes: how a name becomes a complete config. The recipes themselves are in `train_configs`."""
