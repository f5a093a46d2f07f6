"""Answers by the engine on the weights in training, and log π of answers by other weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_loop.data.load.windows import Batch
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import ExitPolicy
from titan_loop.inference.loading import placed
from titan_loop.inference.packed import pack
from titan_loop.inference.rows import Request
from titan_loop.inference.sampling import Sampling
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.models.replay import EXIT_STEP
from titan_loop.rl.reward_loss import (
    OLD_EXIT_LOG_PROB,
    OLD_LOG_PROB,
    PARENT_LOG_PROB,
    READ_STEP,
    written_log_probs,
)


@dataclass
class Answer:
    """Tokens of an answer, the one that ends it too, with the step and log π of each."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class Writer:
    """Writes answers with the weights of a model in training.

    Args:
        context_tokens: Tokens of the longest prompt with its answer.
        parent: The model that π is held near to; None for none.
        dtype: Type of the weights that write; the exit gate stays in fp32.
    """

    def __init__(
        self,
        trained: LoopDecoder,
        options: Any,
        *,
        recurrent_steps: int,
        context_tokens: int,
        policy: ExitPolicy,
        rows: int,
        device: torch.device,
        parent: LoopDecoder | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._trained, self._rows, self._parent = trained, rows, parent
        whole = build_decoder(
            replace(options, attention="sdpa"), max_seq_len=context_tokens, device=device
        )
        self._whole = placed(whole.eval(), device=device, dtype=dtype)
        self._engine = Engine(whole, recurrent_steps=recurrent_steps, exit_policy=policy)
        self.recurrent_steps = recurrent_steps

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights as they are now; collective."""
        weights = self._trained.state_dict()
        for name, whole in self._whole.state_dict().items():
            part = weights[name]
            whole.copy_(part.full_tensor() if isinstance(part, DTensor) else part)
        pack(self._whole)

    def note(self, batch: Batch, *, old: bool) -> None:
        """Write log π of the parent into a batch, and log π_old, by the weights that wrote it."""
        inputs, _ = batch
        if old:
            names = (OLD_LOG_PROB, OLD_EXIT_LOG_PROB)
            for name, values in zip(names, self._read(self._whole, batch), strict=True):
                inputs[name].copy_(values)
        if self._parent is not None:
            inputs[PARENT_LOG_PROB].copy_(self._read(self._parent, batch)[0])

    @torch.no_grad()
    def _read(self, model: LoopDecoder, batch: Batch) -> tuple[Tensor, Tensor]:
        device, labels_BL = self._engine.stack.device, batch[1]
        tokens_BL, exit_BL, read_BL = (
            batch[0][name].to(device) for name in ("input", EXIT_STEP, READ_STEP)
        )
        output = model(
            tokens_BL, recurrent_steps=self.recurrent_steps, columns={EXIT_STEP: exit_BL}
        )
        return written_log_probs(model.lm_head, output, labels_BL.to(device), read_BL)

    def sum_over_ranks(self, value: Tensor) -> float:
        """Return the sum of a count over all ranks; collective."""
        total = value.to(self._engine.stack.device, torch.float64)
        torch.distributed.all_reduce(total)
        return total.item()

    def write(self, requests: Sequence[Request]) -> list[Answer]:
        """Return an answer to each request."""
        answers = [Answer() for _ in requests]
        rows, sampling = min(self._rows, len(requests)), Sampling(temperature=1.0)
        for event in self._engine.stream(requests, rows=rows, sampling=sampling):
            assert event.log_prob is not None
            answer = answers[event.row]
            answer.tokens.append(event.token)
            answer.steps.append(event.step)
            answer.log_probs.append(event.log_prob)
        return answers
