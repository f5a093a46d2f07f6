"""Ouro (LoopLM): a looped decoder with a learned exit, and the format of its released models."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        families={"ouro": "titan_loop.families.ouro.model:OURO"},
        tasks={
            "layered_qa": "titan_loop.families.ouro.layered_qa:LayeredQA",
            "reachability": "titan_loop.families.ouro.reachability:Reachability",
        },
        formats={"transformers": "titan_loop.families.ouro.hugging_face.exporting:FORMAT"},
    )
)
