"""Tasks whose examples are generated."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        tasks={
            "capo": "titan_loop.data.tasks.capo:Capo",
            "mano": "titan_loop.data.tasks.mano:Mano",
        }
    )
)
