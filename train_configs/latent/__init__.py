"""Latent-space reasoning: recipes, graphs of arithmetic, and what models solve and repair."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        tasks={
            "dag_arithmetic": f"{__name__}.task:DagArithmetic",
            "dag_chain_of_thought": f"{__name__}.task:DagChainOfThought",
        },
        analyses={
            "repair": Verb(
                f"{__name__}.solved:repair",
                "corrupt values of the previous step; count the graphs that one step repairs",
            ),
            "solved": Verb(
                f"{__name__}.solved:solved",
                "count graphs whose every factor at every position is right, as in the paper",
            ),
        },
    )
)
