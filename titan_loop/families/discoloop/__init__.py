"""DiscoLoop and PonderLM: between two steps the state is decoded and embedded again."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.discoloop"

register(
    Plugin(
        families={"discoloop": f"{_HERE}.model:DISCOLOOP", "ponder": f"{_HERE}.ponder:PONDER"},
    )
)
