"""What generation by any model must equal: the full forward pass, and itself in other company."""

import torch

from tests.inference.reference import prompts
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import ExitPolicy, QExit
from titan_loop.inference.rows import Completion, Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.decoder import LoopDecoder


@torch.no_grad()
def check_generation(
    model: LoopDecoder, *, steps: int = 3, leaves: ExitPolicy | None = None
) -> list[Completion]:
    """Ragged rows that make room for others, drafts, and rows at different steps, in float64."""
    requests = [Request(prompt=prompt, max_new_tokens=8) for prompt in prompts(9, 2, 6)]
    plain = Engine(model, recurrent_steps=steps).complete(requests, rows=2)
    for request, completion in zip(requests, plain, strict=True):
        states = model(
            torch.tensor([[*request.prompt, *completion.tokens[:-1]]]), recurrent_steps=steps
        ).hidden_RBLD
        expected = model.readout(states[-1])[0, len(request.prompt) - 1 :].argmax(-1)
        assert [*completion.tokens] == expected.tolist()
    for draft_step in range(1, steps):
        drafting = Engine(model, recurrent_steps=steps, speculation=SelfSpeculation(draft_step, 3))
        assert drafting.complete(requests, rows=2) == plain
    engine = Engine(model, recurrent_steps=steps, exit_policy=leaves or QExit(0.7))
    together = engine.complete(requests)
    assert together == [engine.complete([request])[0] for request in requests]
    assert len({step for completion in together for step in completion.steps}) > 1
    return plain
