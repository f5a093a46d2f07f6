"""Ouro (LoopLM): a looped decoder with a learned exit, and the format of its released models."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        families={"ouro": "titan_loop.families.ouro.model:OURO"},
        formats={"transformers": "titan_loop.families.ouro.hugging_face.exporting:FORMAT"},
    )
)
