"""Analyses of recurrent steps: one file each, from a run to its record, table and plot.

    titan-loop analyse VERB RUN ─► a function here ─► Findings ─┬─► lines on the terminal
                                                                ├─► evals/VERB-step-N.json
                                                                └─► plots/*.png ─► report

A function's parameters are the verb's flags and its docstring is the verb's help. They are
registered here without being imported; a family registers its own in its folder.
"""

from titan_loop.plugins import Plugin, Verb, register

_HERE = "titan_loop.analysis.steps"

_ANALYSES = {
    "lens": Verb(
        f"{_HERE}.lens:analyse_lens",
        "read bridge and target off the states after every layer of every step",
    ),
    "patching": Verb(
        f"{_HERE}.patching:analyse_patching",
        "replace single states by another question's; measure the effect",
    ),
}
register(Plugin(analyses=_ANALYSES))
