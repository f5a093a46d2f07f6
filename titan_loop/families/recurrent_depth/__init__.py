"""Recurrent depth: GPT-2's blocks, looped, that learn to compose facts."""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.families.recurrent_depth"

register(
    Plugin(
        families={"recurrent_depth": f"{_HERE}.model:RECURRENT_DEPTH"},
        tasks={
            "english_hops": f"{_HERE}.english_hops:EnglishHops",
            "padded_hops": f"{_HERE}.permutation_hops:PaddedHops",
            "padded_two_hop": f"{_HERE}.two_hop_systematic:PaddedTwoHop",
            "permutation_hops": f"{_HERE}.permutation_hops:PermutationHops",
            "told_hops": f"{_HERE}.english_hops:ToldHops",
            "two_hop_systematic": f"{_HERE}.two_hop_systematic:TwoHopSystematic",
        },
        objectives={"SmoothedLoss": f"{_HERE}.objective:SmoothedLoss"},
        analyses={
            "steps": Verb(
                f"{_HERE}.step_exam:analyse_steps",
                "ask the exam after every step: accuracy, margin, where exit policies halt",
            )
        },
    )
)
