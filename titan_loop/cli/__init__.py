"""The `titan-loop` command: a thin module for each larger verb, and `views.py`.

    main ── looks up the verb ──▶ train, data, eval, upcycle, plot, … ──▶ the package

tyro reads every command line. A verb is a function: its parameters are the flags, its docstring is
`--help` (`arguments.py`). `train`, `plan` and `slurm` read all other flags as fields of the
recipe's config (`stage_flags.py`, `overrides.py`). Nothing here imports torch before a verb needs
it, so that help and mistakes answer at once.
"""
