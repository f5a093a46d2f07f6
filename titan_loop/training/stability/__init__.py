"""Parts that keep a run alive without a person: one idea a module; README.md explains them."""
