"""Tasks whose examples are generated."""

from titan_loop.plugins import Plugin, register

register(Plugin(tasks={"mano": "titan_loop.data.tasks.mano:Mano"}))
