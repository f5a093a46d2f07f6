"""Retrofits of SmolLM2 and others: recipes, and facts and questions in English."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        tasks={
            "english_hops": f"{__name__}.english_hops:EnglishHops",
            "told_hops": f"{__name__}.english_hops:ToldHops",
        },
    )
)
