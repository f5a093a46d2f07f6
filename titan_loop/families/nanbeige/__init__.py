"""Nanbeige: looped Llama blocks, the loop that inference engines run; dense Llama at R = 1."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        families={"nanbeige": "titan_loop.families.nanbeige.model:NANBEIGE"},
        formats={
            "nanbeige": "titan_loop.families.nanbeige.formats:NANBEIGE_FOLDER",
            "llama-unrolled": "titan_loop.families.nanbeige.formats:LLAMA_FOLDER",
        },
    )
)
