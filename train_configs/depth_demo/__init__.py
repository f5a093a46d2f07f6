"""The purpose of looping, on the Mano task: one layer visited once, and visited four times."""
