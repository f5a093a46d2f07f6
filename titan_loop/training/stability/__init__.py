"""What keeps a run alive without a person: each module is one idea, and README.md explains them."""
