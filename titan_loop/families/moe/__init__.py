"""Looped mixtures of experts: Llama's blocks whose feed-forward is sparse."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        families={"moe": "titan_loop.families.moe.model:MOE"},
        objectives={"MoELoss": "titan_loop.families.moe.objective:MoELoss"},
    )
)
