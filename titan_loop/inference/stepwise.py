"""Plain decoding: every call advances each row by one recurrent step, whichever that is.

A token that leaves the recurrence is read out and its successor starts at step 1 in the next call,
while its neighbours go on. No row waits for another, and every step that runs is used.
"""

from collections.abc import Iterator

from titan_loop.inference.rows import Batch, GeneratedToken


def advance(batch: Batch) -> Iterator[GeneratedToken]:
    """Apply the stack once to all rows; yield the tokens of those that leave."""
    rows, stack = batch.rows, batch.stack
    for row in rows:
        row.step += 1
    steps = [row.step for row in rows]
    context = batch.context()
    reads = batch.decider.reads(steps)
    state = stack.step(
        batch.state,
        batch.column(row.token for row in rows) if 1 in steps else None,
        steps,
        context._replace(said_BLV=batch.decider.log_prob),
        reads=reads,
    )
    before = state if batch.state is None else batch.state
    batch.state = state
    if not reads:  # so nothing leaves
        return
    step_BL = batch.column(steps)
    leaves_BL = batch.decider.decide(step_BL, state.read_BLD, before.read_BLD)
    leaving = leaves_BL[:, 0].nonzero()[:, 0]
    if not len(leaving):
        return
    batch.cache.leave(leaving, context.positions_BL[leaving, 0], step_BL[leaving, 0])
    left = [rows[index] for index in leaving.tolist()]
    logits_BV = batch.decider.logits(state.read_BLD[leaving], leaving)[:, 0]
    for row, token in zip(left, batch.sample(logits_BV, left), strict=True):
        yield row.accept(token, row.step)
