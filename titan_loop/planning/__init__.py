"""Planning: what a recipe needs on a cluster that is not there."""
