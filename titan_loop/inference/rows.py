"""Requests, the rows that run them, and the batch of rows that share calls of the stack.

A row ends at a stop token, at a stop string of its text, at its own limit, or at the end of the
model's context, whichever comes first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from titan_loop.inference.cache import LoopCache
from titan_loop.inference.captured import CapturedVisits
from titan_loop.inference.detokenizer import Detokenizer
from titan_loop.inference.exit_decider import ExitDecider, append_rows
from titan_loop.inference.measures import log_probabilities
from titan_loop.inference.sampling import Sampling, draw, probabilities
from titan_loop.inference.stack import LoopState, Stack
from titan_loop.models.context import LoopContext
from titan_loop.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FinishReason = Literal["stop_token", "stop_string", "limit", "context"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and the conditions under which its continuation ends.

    Attributes:
        prompt: Token ids, at least one.
        stop_tokens: Tokens that end the row; the completion does not include them.
        text: Turns tokens into text and finds stop strings; None for token ids only.
        seed: Seed of the row's random numbers; None draws one from the stream's generator.
        log_probs: Whether the completion has each token's log-probability, before temperature.
        prefix_tokens: Number of the prompt's first tokens that a model with a prefix reads in both
            directions; None for all. Of a chat it is the question before the first answer, as in
            training.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 64
    stop_tokens: frozenset[int] = frozenset()
    text: Detokenizer | None = None
    seed: int | None = None
    log_probs: bool = False
    prefix_tokens: int | None = None


def text_requests(
    tokenizer: "Tokenizer",
    prompts: Sequence[str | list[int]],
    *,
    stop_tokens: frozenset[int],
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    seeds: Sequence[int | None] | None = None,
    prefixes: Sequence[int | None] | None = None,
    begin: int | None = None,
) -> list[Request]:
    """Return requests whose completions have text; prompts may contain special tokens as text.

    As in training, `begin` is put in front of texts, whatever `tokenizer.json` would add. What
    follows a text goes on from it; what follows ids, as in chats, is a text of its own.
    """
    none = [None] * len(prompts)
    encoded = [
        encode_prompt(tokenizer, each, begin) if isinstance(each, str) else each for each in prompts
    ]
    return [
        Request(
            prompt=ids,
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
            text=Detokenizer(tokenizer, stop, ids if isinstance(prompt, str) else ()),
            seed=seed,
            prefix_tokens=prefix,
        )
        for prompt, ids, seed, prefix in zip(
            prompts, encoded, seeds or none, prefixes or none, strict=True
        )
    ]


class GeneratedToken(NamedTuple):
    """One event of a stream, in the order in which rows leave the recurrence.

    Attributes:
        step: Recurrent step whose readout it was sampled from.
        text: Text that became certain; empty without a `Detokenizer`, inside a character, or while
            a stop string may have begun.
        finish: Reason why the row ends with this token; None if it goes on.
        log_prob: Its log-probability in nats, if the request wants it.
    """

    row: int
    token: int
    step: int
    text: str = ""
    finish: FinishReason | None = None
    log_prob: float | None = None


@dataclass(kw_only=True)
class Completion:
    """The result of one request, without the stop token.

    Attributes:
        log_probs: Log-probabilities of the tokens, if the request wants them.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None

    def add(self, event: GeneratedToken) -> None:
        """Append one of the row's events."""
        if event.finish != "stop_token":
            self.tokens.append(event.token)
            self.steps.append(event.step)
            if event.log_prob is not None:
                self.log_probs.append(event.log_prob)
        self.text += event.text
        self.finish = event.finish


class Row:
    """A request that is running."""

    def __init__(self, index: int, request: Request, *, context_tokens: int, seed: int) -> None:
        self.index = index
        self.token = -1
        self.position = len(request.prompt) - 1
        self.step = 0
        self.finish: FinishReason | None = None
        self.share = 0.0
        self.log_prob: float | None = None
        self._request = request
        self._room = context_tokens - len(request.prompt)
        self._produced = 0
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self._request.prompt

    @property
    def tells_log_prob(self) -> bool:
        """Whether each token is told with its log-probability."""
        return self._request.log_probs

    @property
    def prefix_tokens(self) -> int:
        """Number of the prompt's first tokens that are a prefix."""
        prefix = self._request.prefix_tokens
        return len(self.prompt) if prefix is None else prefix

    @property
    def remaining(self) -> int:
        """Number of tokens the row may still produce."""
        return min(self._request.max_new_tokens, self._room) - self._produced

    def uniform(self) -> float:
        """Return the next random number of this row, in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def accept(self, token: int, step: int) -> GeneratedToken:
        """Continue with `token`, read from `step`; end the row if one of its conditions holds."""
        self.token = token
        self.position += 1
        self.step = 0
        self._produced += 1
        text, stream = "", self._request.text
        if token in self._request.stop_tokens:
            self.finish = "stop_token"
        elif stream is not None:
            text = stream.push(token)
        if stream is not None and stream.stopped:
            self.finish = "stop_string"
        elif self.finish is None and self.remaining == 0:
            self.finish = "limit" if self._produced == self._request.max_new_tokens else "context"
        if stream is not None and self.finish is not None and not stream.stopped:
            text += stream.rest()
        return GeneratedToken(self.index, token, step, text, self.finish, self.log_prob)


def draw_rows(weight_BV: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw a token for each row from (B, V) weights, with the row's own random numbers."""
    uniform_B = torch.tensor(
        [row.uniform() for row in rows], dtype=torch.float64, device=weight_BV.device
    )
    return draw(weight_BV, uniform_B).tolist()


@dataclass(kw_only=True)
class Batch:
    """State of a decoding loop; row b of every tensor belongs to `rows[b]`.

    Attributes:
        cache: The rows' keys and values, with room for as many rows as may run at once.
        state: State of each row's newest token after `Row.step` steps; None before the first.
        captured: Graphs of the visits of this cache; None without.
    """

    stack: Stack
    rows: list[Row]
    cache: LoopCache
    decider: ExitDecider
    sampling: Sampling
    recurrent_steps: int
    state: LoopState | None = None
    captured: CapturedVisits | None = None
    _placed: tuple[list[int], LoopContext] | None = None

    def advance(self) -> Iterator[GeneratedToken]:
        """Take each row one recurrent step further; yield the tokens that leave.

        The successor of a token that leaves starts at step 1 in the next call: no row waits.
        """
        for row in self.rows:
            row.step += 1
        steps = [row.step for row in self.rows]
        reads = self.decider.reads(steps)
        state = self._visited(steps, reads=reads)
        before = state if self.state is None else self.state
        self.state = state
        if not reads:  # then no token can leave
            return
        step_BL = self.column(steps)
        share_BL = self.shares(self.rows, self.decider)
        leaves_BL = self.decider.decide(step_BL, state.read_BLD, before.read_BLD, share_BL)
        leaving = leaves_BL[:, 0].nonzero()[:, 0]
        if not len(leaving):
            return
        left = [self.rows[index] for index in leaving.tolist()]
        positions = self.column(row.position for row in left)[:, 0]
        self.cache.leave(leaving, positions, step_BL[leaving, 0])
        logits_BV = self.stack.readout(state.read_BLD[leaving])[:, 0]
        for row, token in zip(left, self.sample(logits_BV, left), strict=True):
            yield row.accept(token, row.step)

    def _visited(self, steps: Sequence[int], *, reads: bool) -> LoopState:
        tokens = [row.token for row in self.rows]
        captured = self.captured if self.stack.captures_rows(steps) else None
        if captured is not None and self.state is not None:
            positions = [row.position for row in self.rows]
            return captured.step(self.state, tokens, steps, positions, reads=reads)
        tokens_BL = self.column(tokens) if 1 in steps else None
        context = self._context()._replace(said_BLV=self.decider.log_prob)
        return self.stack.step(self.state, tokens_BL, steps, context, reads=reads)

    def shares(self, rows: Sequence[Row], decider: ExitDecider) -> Tensor | None:
        """Return the random number of each row's token, drawn as it begins; None if none is needed.

        Rows at step 0 are prompts, whose last token begins.
        """
        drawing = [row for row in rows if decider.draws(row)]
        if not drawing:
            return None
        for row in drawing:
            if row.step <= 1:
                row.share = row.uniform()
        return torch.tensor(
            [[row.share] for row in rows], dtype=torch.float64, device=self.stack.device
        )

    def _context(self) -> LoopContext:
        positions = [row.position for row in self.rows]
        if self._placed is None or self._placed[0] != positions:
            context = self.stack.token_context(self.column(positions), self.cache)
            self._placed = positions, context
        return self._placed[1]

    def column(self, values: Iterable[int]) -> Tensor:
        """Return one integer per row as (B, 1)."""
        return torch.tensor([[value] for value in values], device=self.stack.device)

    def sample(self, logits_BV: Tensor, rows: list[Row]) -> list[int]:
        """Draw a token for each of `rows` from (B, V) logits, and note its log-probability."""
        if self.sampling.temperature == 0.0:
            tokens = logits_BV.argmax(-1).tolist()
        else:
            tokens = self.draw(probabilities(logits_BV, self.sampling), rows)
        told = [place for place, row in enumerate(rows) if row.tells_log_prob]
        if told:
            log_prob_BV = log_probabilities(logits_BV[told])
            said = log_prob_BV[range(len(told)), [tokens[place] for place in told]]
            for place, log_prob in zip(told, said.tolist(), strict=True):
                rows[place].log_prob = log_prob
        return tokens

    def draw(self, weight_BV: Tensor, rows: list[Row]) -> list[int]:
        """Draw a token for each of `rows` from (B, V) weights."""
        if self.sampling.temperature == 0.0:
            return weight_BV.argmax(-1).tolist()  # one-hot: a random number would change nothing
        return draw_rows(weight_BV, rows)

    def admit(self, rows: list[Row]) -> None:
        """Append rows whose prompts are done and that are about to start a token."""
        self.rows = self.rows + rows
        self.decider.admit(len(rows))
        if self.state is not None:  # new rows start, so their zeros are never read
            self.state = tree_map(lambda leaf: append_rows(leaf, len(rows)), self.state)

    def drop_finished(self) -> None:
        """Drop the rows that have ended."""
        kept = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(kept) == len(self.rows):
            return
        # The last rows move into the gaps: the cache copies what moves.
        last = iter(index for index in kept if index >= len(kept))
        kept = [
            index if self.rows[index].finish is None else next(last) for index in range(len(kept))
        ]
        self.rows = [self.rows[index] for index in kept]
        self.cache.select(kept)
        self.decider.select(kept)
        if self.state is not None:
            self.state = tree_map(lambda leaf: leaf[kept], self.state)
