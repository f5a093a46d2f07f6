"""Ouro (LoopLM): the published recipe, and analyses of its answers at every recurrent step."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        analyses={
            "agreement": Verb(
                f"{__name__}.agreement:analyse_agreement",
                "count the items on which two recurrent steps give the same answer",
            ),
            "probes": Verb(
                f"{__name__}.probes:analyse_probes",
                "predict each step's answer from the states of every layer and step",
            ),
            "pca": Verb(
                f"{__name__}.components:analyse_components",
                "draw the last prompt token's states on two principal components",
            ),
            "prefill": Verb(
                f"{__name__}.prefill:analyse_prefill",
                "score continuations of prompts that ran fewer recurrent steps",
            ),
            "safety": Verb(
                f"{__name__}.safety:analyse_safety",
                "count the completions that a judge calls harmful, at every depth",
            ),
        },
    )
)
