"""Scores continuations of token sequences at every reading, in padded batches, over all ranks.

Requests with the same input share one row: the four answers of a multiple-choice question that are
one token each cost one forward pass. Padding is on the right, where causal attention cannot see it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from titan_loop.evaluation.readings import Reading, score_states
from titan_loop.evaluation.share_work import share_work
from titan_loop.inference.exit_policy import require_exit_policy
from titan_loop.models.decoder import LoopDecoder


class TokenRequest(NamedTuple):
    """Score `continuation` after `context`; both have at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class ContinuationScores(NamedTuple):
    """Sums of nats and steps at every reading, and whether greedy decoding gives the same."""

    nats: list[float]
    greedy: list[bool]
    steps: list[int]
    tokens: int


class TokenScorer:
    """Scores requests with one model, which is in evaluation mode and whole on every rank."""

    def __init__(
        self, model: LoopDecoder, readings: Sequence[Reading], *, batch_rows: int = 8
    ) -> None:
        for reading in readings:
            require_exit_policy(model, reading.policy)
        self.model = model
        self.readings = list(readings)
        self.deepest_step = max(reading.deepest_step for reading in readings)
        self._batch_rows = batch_rows
        self._device = model.tok_embeddings.weight.device

    def score(self, requests: Sequence[TokenRequest]) -> list[ContinuationScores]:
        """Return the scores of all requests; collective."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            rows.setdefault((*request.context, *request.continuation)[:-1], []).append(index)
        longest_first = sorted(rows.items(), key=lambda row: -len(row[0]))

        def work(share: Sequence) -> list[list[ContinuationScores]]:
            results: list[list[ContinuationScores]] = []
            for start in range(0, len(share), self._batch_rows):
                batch = share[start : start + self._batch_rows]
                wanted = [[requests[index].continuation for index in row[1]] for row in batch]
                results += self._score_batch([row[0] for row in batch], wanted)
            return results

        scores: dict[int, ContinuationScores] = {}
        for (_, indices), row in zip(longest_first, share_work(longest_first, work), strict=True):
            scores.update(zip(indices, row, strict=True))
        return [scores[index] for index in range(len(requests))]

    @torch.no_grad()
    def _score_batch(
        self, inputs: list[tuple[int, ...]], wanted: list[list[tuple[int, ...]]]
    ) -> list[list[ContinuationScores]]:
        rows = [torch.tensor(tokens, device=self._device) for tokens in inputs]
        input_BL = pad_sequence(rows, batch_first=True)
        longest = input_BL.shape[1]
        output = self.model(input_BL, recurrent_steps=self.deepest_step, collect="all")
        positions, labels, lengths = [], [], []
        for row, (tokens, continuations) in enumerate(zip(inputs, wanted, strict=True)):
            for continuation in continuations:
                # One less would read the last state of the row before.
                assert len(continuation) <= len(tokens), "a continuation without a context"
                first = row * longest + len(tokens) - len(continuation)
                positions += range(first, first + len(continuation))
                labels += continuation
                lengths.append(len(continuation))
        position_T = torch.tensor(positions, device=self._device)
        scores = score_states(
            self.model,
            [hidden_BLD.flatten(0, 1)[position_T] for hidden_BLD in output.hidden_RBLD],
            torch.tensor(labels, device=self._device),
            self.readings,
        )
        parts = zip(
            *(tensor.cpu().split(lengths, dim=1) for tensor in scores), lengths, strict=True
        )
        each = iter(
            ContinuationScores(
                nats.double().sum(1).tolist(), right.all(1).tolist(), steps.sum(1).tolist(), length
            )
            for nats, right, steps, length in parts
        )
        return [[next(each) for _ in continuations] for continuations in wanted]
