"""DiscoLoop and PonderLM: between two steps the state is decoded and embedded again."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        families={
            "discoloop": "titan_loop.families.discoloop.model:DISCOLOOP",
            "ponder": "titan_loop.families.discoloop.ponder:PONDER",
        },
        tasks={"two_graph": "titan_loop.families.discoloop.task:TwoGraph"},
    )
)
