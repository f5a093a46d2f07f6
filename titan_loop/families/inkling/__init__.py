"""Inkling: passes that start again from the same states and read the pass before as messages."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.inkling"

register(
    Plugin(
        families={"inkling": f"{_HERE}.model:INKLING"},
        formats={"inkling": f"{_HERE}.formats:INKLING_FOLDER"},
    )
)
