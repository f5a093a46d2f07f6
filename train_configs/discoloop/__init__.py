"""DiscoLoop and PonderLM: recipes, questions over two graphs, and analyses of the decoded state."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        tasks={
            "two_graph": f"{__name__}.task:TwoGraph",
        },
        analyses={
            "bridge": Verb(
                f"{__name__}.bridge:analyse_bridge",
                "measure how clearly states say a question's bridge, and in which form",
            ),
            "intervention": Verb(
                f"{__name__}.bridge:analyse_intervention",
                "replace a state by the embedding of the token that it decodes to",
            ),
        },
    )
)
