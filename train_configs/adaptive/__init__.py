"""Adaptive loops and memory: recipes, their task, and analyses of layers that loop."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        tasks={
            "mano_capo": f"{__name__}.task:ManoCapo",
        },
        analyses={
            "loops": Verb(
                f"{__name__}.loops:analyse_loops",
                "draw the iterations of layers against the loss, over training",
            ),
        },
    )
)
