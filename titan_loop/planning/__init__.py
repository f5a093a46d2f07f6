"""Planning: the needs of a recipe on a cluster that is not here."""
