"""Adaptive loops and memory: every layer decides how often it loops, and reads learned memory."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.adaptive"

register(
    Plugin(
        families={"adaptive": f"{_HERE}.model:ADAPTIVE"},
        objectives={"PonderCostLoss": f"{_HERE}.objective:PonderCostLoss"},
        charts={"layers": f"{_HERE}.layer_plots:LAYERS"},
    )
)
