"""Recurrent depth: recipes, facts to compose, and an exam after every recurrent step."""

from titan_loop.plugins import Plugin, Verb, register

register(
    Plugin(
        tasks={
            "permutation_hops": f"{__name__}.permutation_hops:PermutationHops",
            "two_hop_systematic": f"{__name__}.two_hop_systematic:TwoHopSystematic",
        },
        analyses={
            "lens": Verb(
                f"{__name__}.lens:analyse_lens",
                "read bridge and target off the states after every layer of every step",
            ),
            "steps": Verb(
                f"{__name__}.step_exam:analyse_steps",
                "ask the exam after every step: accuracy, first right answers",
            ),
        },
    )
)
