"""Training: what happens between two checkpoints, on any number of ranks.

    config ─► preflight: refusals ─► resolved_run ─► trainer
    schedule (a value of global tokens) ─► batch_schedule, recurrence, learning rate ─► step_plan
                                  │
    data ─► trainer: micro-batches ─► objective ─► stability: update or skip
                                  │
                                  └─► metrics ─► run directory; callback (what recipes pass in)

Everything a schedule decides depends on the global token counter only, never on the world size.
"""
