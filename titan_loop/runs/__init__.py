"""A saved run: its folder, its config, its checkpoints and where it comes from."""
