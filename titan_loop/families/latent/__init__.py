"""Latent-space reasoning: discrete, factored states, one layer of a graph per step."""

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
                "find the heads that copy names and values, the form of sums, sources of errors",
            ),
            "repair": Verb(
                f"{_HERE}.analysis:repair",
                "corrupt values of the previous step; count the graphs that one step repairs",
            ),
            "solved": Verb(
                f"{_HERE}.analysis:solved",
                "count graphs whose every factor at every position is right, as in the paper",
            ),
        },
    )
)
