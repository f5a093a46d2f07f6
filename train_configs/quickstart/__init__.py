"""The quick start: one looped layer on code, prose and mathematics, R = 4."""
