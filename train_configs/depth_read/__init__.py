"""Early recurrent steps that can be read: objectives, gates and their price."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        objectives={
            "ReadableStepsLoss": f"{__name__}.readable_steps:ReadableStepsLoss",
        },
    )
)
