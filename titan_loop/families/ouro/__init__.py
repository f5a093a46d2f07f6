"""Ouro (LoopLM): a looped decoder with a learned exit, and the format of its released models."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.ouro"

register(
    Plugin(
        families={"ouro": f"{_HERE}.model:OURO"},
        tasks={
            "capo": f"{_HERE}.capo:Capo",
            "commuted_mano": f"{_HERE}.commuted_mano:CommutedMano",
            "layered_paths": f"{_HERE}.layered_paths:LayeredPaths",
            "layered_qa": f"{_HERE}.layered_qa:LayeredQA",
            "reachability": f"{_HERE}.reachability:Reachability",
        },
        analyses={
            "agreement": Verb(
                f"{_HERE}.agreement:analyse_agreement",
                "count the items on which two recurrent steps give the same answer",
            ),
            "probes": Verb(
                f"{_HERE}.probes:analyse_probes",
                "predict each step's answer from the states of every layer and step",
            ),
            "pca": Verb(
                f"{_HERE}.components:analyse_components",
                "draw the last prompt token's states on two principal components",
            ),
            "prefill": Verb(
                f"{_HERE}.prefill:analyse_prefill",
                "score continuations of prompts that ran fewer recurrent steps",
            ),
            "safety": Verb(
                f"{_HERE}.safety:analyse_safety",
                "count the completions that a judge calls harmful, at every depth",
            ),
        },
        suites={
            "ouro_base": f"{_HERE}.suites:OURO_BASE",
            "depth": f"{_HERE}.suites:DEPTH",
            "scaling": f"{_HERE}.suites:SCALING",
        },
        formats={"transformers": f"{_HERE}.hugging_face.exporting:FORMAT"},
        objectives={
            "AdaptiveGateLoss": f"{_HERE}.objective:AdaptiveGateLoss",
            "ReadableStepsLoss": f"{_HERE}.readable_steps:ReadableStepsLoss",
        },
    )
)
