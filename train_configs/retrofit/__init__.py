"""Loops made of dense models: SmolLM2-135M on one core, and TinyLlama-1.1B as published."""
