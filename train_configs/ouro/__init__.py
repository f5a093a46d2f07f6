"""Ouro (LoopLM): the published recipe, and prompts at fewer steps than their continuations."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        analyses={
            "prefill": Verb(
                f"{__name__}.prefill:analyse_prefill",
                "score continuations of prompts that ran fewer recurrent steps",
            ),
        },
    )
)
