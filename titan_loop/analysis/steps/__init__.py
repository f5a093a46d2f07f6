"""Shared parts of analyses of recurrent steps; families and studies register their own.

    titan-loop analyse VERB RUN ─► a function of a plugin ─► Findings ─┬─► lines on the terminal
                                                                       ├─► evals/VERB-step-N.json
                                                                       └─► plots/*.png ─► report

A function's parameters are the verb's flags and its docstring is the verb's help.
"""
