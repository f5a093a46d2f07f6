"""Latent-space reasoning: discrete, factored states, one layer of a graph per step."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.latent"

register(
    Plugin(
        families={"latent": f"{_HERE}.model:LATENT"},
        objectives={"LatentSupervision": f"{_HERE}.objective:LatentSupervision"},
    )
)
