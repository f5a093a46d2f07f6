"""Looped mixtures of experts: four kinds of models at equal FLOPs, and xLLM's as published."""
