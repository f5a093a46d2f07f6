"""Ouro's section 6: knowledge, arithmetic and hops, as published and in miniature."""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        tasks={
            "capo": f"{__name__}.capo:Capo",
            "commuted_mano": f"{__name__}.commuted_mano:CommutedMano",
            "layered_paths": f"{__name__}.layered_paths:LayeredPaths",
            "layered_qa": f"{__name__}.layered_qa:LayeredQA",
        },
    )
)
