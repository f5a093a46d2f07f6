"""Looped mixtures of experts: Llama's blocks whose feed-forward is sparse."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        families={"moe": "titan_loop.families.moe.model:MOE"},
        matches=dict.fromkeys(
            ("flops", "parameters", "kv"), "titan_loop.families.moe.match:matched"
        ),
        objectives={"MoELoss": "titan_loop.families.moe.objective:MoELoss"},
    )
)
