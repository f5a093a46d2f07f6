"""Recurrent depth: GPT-2's blocks, looped, that learn to compose facts."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.recurrent_depth"

register(
    Plugin(
        families={"recurrent_depth": f"{_HERE}.model:RECURRENT_DEPTH"},
    )
)
