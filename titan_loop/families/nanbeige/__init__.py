"""Nanbeige: the format in which inference engines run a loop of Llama's blocks."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        formats={"nanbeige": "titan_loop.families.nanbeige.formats:NANBEIGE_FOLDER"},
    )
)
