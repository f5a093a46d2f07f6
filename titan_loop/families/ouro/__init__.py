"""Ouro (LoopLM): a looped decoder with a learned exit, and the format of its released models."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.ouro"

register(
    Plugin(
        families={"ouro": f"{_HERE}.model:OURO"},
        suites={
            "ouro_base": f"{_HERE}.suites:OURO_BASE",
            "depth": f"{_HERE}.suites:DEPTH",
            "scaling": f"{_HERE}.suites:SCALING",
        },
        formats={"transformers": f"{_HERE}.hugging_face.ouro_shape:FORMAT"},
        objectives={
            "AdaptiveGateLoss": f"{_HERE}.objective:AdaptiveGateLoss",
        },
    )
)
