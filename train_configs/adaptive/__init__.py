"""Adaptive loops and memory: recipes and their task."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        tasks={
            "mano_capo": f"{__name__}.task:ManoCapo",
        },
    )
)
