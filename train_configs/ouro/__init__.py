"""Ouro (LoopLM): the published recipe, and analyses of its answers at every recurrent step."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        analyses={
            "agreement": Verb(
                f"{__name__}.answers:analyse_agreement",
                "count the items on which two recurrent steps give the same answer",
            ),
            "probes": Verb(
                f"{__name__}.answers:analyse_probes",
                "predict each step's answer from the states of every layer and step",
            ),
            "prefill": Verb(
                f"{__name__}.prefill:analyse_prefill",
                "score continuations of prompts that ran fewer recurrent steps",
            ),
        },
    )
)
