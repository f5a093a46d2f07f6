"""The callbacks that a run's config switches on; one that is off adds no work."""
