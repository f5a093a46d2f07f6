"""xLLM-Loop: recipes, and the course of a learned distribution of depths."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        analyses={
            "learned-depths": Verb(
                f"{__name__}.analysis:learned_depths",
                "show the course of a learned distribution of depths",
            ),
        },
    )
)
