"""DiscoLoop and PonderLM: between two steps the state is decoded and embedded again."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.discoloop"

register(
    Plugin(
        families={"discoloop": f"{_HERE}.model:DISCOLOOP", "ponder": f"{_HERE}.ponder:PONDER"},
        tasks={"two_graph": f"{_HERE}.task:TwoGraph"},
        analyses={
            "bridge": Verb(
                f"{_HERE}.bridge:analyse_bridge",
                "measure how clearly states say a question's bridge, and in which form",
            ),
            "intervention": Verb(
                f"{_HERE}.intervention:analyse_intervention",
                "replace a state by the embedding of the token that it decodes to",
            ),
        },
    )
)
