"""Planning: a recipe's needs on a cluster that is not at hand."""
