"""Turns the name of a recipe into stages and runs them. The recipes are in `train_configs`."""
