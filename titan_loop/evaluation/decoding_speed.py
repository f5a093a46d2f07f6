"""Seconds that a generated token takes under each reading, measured in the engine."""

import time
from collections.abc import Sequence

from titan_loop.evaluation.readings import Reading
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder

_NEW_TOKENS = 16


def seconds_per_token(
    model: LoopDecoder, readings: Sequence[Reading], prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return reading → seconds per generated token, by name.

    All prompts run side by side, so this is the batch's time per token, without the time of the
    prompts themselves. Other work on the machine adds to it.
    """
    requests = [Request(prompt=prompt, max_new_tokens=_NEW_TOKENS) for prompt in prompts]
    seconds: dict[str, float] = {}
    for reading in readings:
        engine = Engine(model, recurrent_steps=reading.recurrent_steps, exit_policy=reading.policy)
        events = engine.stream(requests)
        for _ in requests:  # the first tokens take the prompts' time
            next(events)
        start = time.perf_counter()
        tokens = sum(1 for _ in events)
        seconds[reading.name] = (time.perf_counter() - start) / max(tokens, 1)
    return seconds
