"""A search for a recipe that makes looping pay: one model, several ways, the same text."""
