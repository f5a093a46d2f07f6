"""Looped mixtures of experts: Llama's blocks whose feed-forward is sparse."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.moe"

register(
    Plugin(
        families={"moe": f"{_HERE}.model:MOE"},
        charts={"experts": f"{_HERE}.load_plot:LOADS"},
        formats={
            "mixtral-unrolled": f"{_HERE}.formats:MIXTRAL_FOLDER",
            "glm4_moe-unrolled": f"{_HERE}.formats:GLM_FOLDER",
            "ernie4_5_moe-unrolled": f"{_HERE}.formats:ERNIE_FOLDER",
        },
        objectives={"MoELoss": f"{_HERE}.objective:MoELoss"},
        verbs={
            "moe": Verb(f"{_HERE}.upcycling:moe", "experts for a dense model"),
        },
    )
)
