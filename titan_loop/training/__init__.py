"""Training: from one checkpoint to the next, on any number of ranks.

    config ─► preflight: refusals ─► resolved_run ─► trainer
    schedule (a value of global tokens) ─► batch_schedule, depth_schedule, rates ─► step_plan
                                  │
    data ─► trainer: micro-batches ─► objective ─► stability: update or skip
                                  │
                                  └─► metrics ─► run directory; callbacks (the recipe's)

Everything a schedule decides depends on the global token counter only, never on the world size.
"""
