"""Adaptive loops and memory: every layer decides how often it loops, and reads learned memory."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.adaptive"

register(
    Plugin(
        families={"adaptive": f"{_HERE}.model:ADAPTIVE"},
        tasks={"mano_capo": f"{_HERE}.task:ManoCapo"},
        objectives={"PonderCostLoss": f"{_HERE}.objective:PonderCostLoss"},
        exit_policies={"survival": f"{_HERE}.exit_policy:Survival"},
        analyses={
            "loops": Verb(
                f"{_HERE}.loops:analyse_loops",
                "draw the iterations of layers against the loss, over training",
            ),
            "survival": Verb(
                f"{_HERE}.survival:survival",
                "halt tokens one by one in layers that loop; show the cost",
            ),
        },
        charts={"layers": f"{_HERE}.layer_plots:LAYERS"},
    )
)
