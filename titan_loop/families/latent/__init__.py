"""Latent-space reasoning: discrete, factored states, one layer of a graph a step."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.latent"

register(
    Plugin(
        families={"latent": f"{_HERE}.model:LATENT"},
        tasks={
            "dag_arithmetic": f"{_HERE}.task:DagArithmetic",
            "dag_chain_of_thought": f"{_HERE}.task:DagChainOfThought",
        },
        objectives={"LatentSupervision": f"{_HERE}.objective:LatentSupervision"},
        analyses={
            "circuits": Verb(
                f"{_HERE}.analysis:circuits",
                "show which heads copy names and values, how sums are computed, what goes wrong",
            ),
            "repair": Verb(
                f"{_HERE}.analysis:repair",
                "corrupt values of the step before; count graphs repaired in one step",
            ),
            "solved": Verb(
                f"{_HERE}.analysis:solved",
                "count graphs of which every factor at every position is right, as the paper",
            ),
        },
    )
)
