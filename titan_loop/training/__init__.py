"""Training: what happens between two checkpoints, on any number of ranks.

    schedule (a value of global tokens) ─► batch_schedule, recurrence, learning rate, β
                                  │
    data ─► trainer: micro-batches ─► objective ─► stability: update or skip
                                  │
                                  └─► metrics ─► run_directory; callback (what recipes pass in)

Everything a schedule decides depends on the global token counter only, never on the world size.
"""
