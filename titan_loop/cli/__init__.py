"""The `titan-loop` command: one thin module per verb, each with `run(arguments) -> exit code`.

    main ── looks up the verb ──▶ train, data, eval, upcycle, plot, … ──▶ the package

Nothing here imports torch before a verb needs it, so that help and mistakes answer at once.
"""
