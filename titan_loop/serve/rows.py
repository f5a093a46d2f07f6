"""Rows that share calls of the stack, each with its own depth, exit policy and sampling.

A row's settings may change while it writes; its next token follows the new ones. Shape suffixes are
as in `inference/`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from titan_loop.errors import UserError, require_at_least
from titan_loop.inference.cache import LoopCache
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_decider import ExitDecider
from titan_loop.inference.exit_policy import ExitPolicy, StaticStep, require_exit_policy
from titan_loop.inference.measures import log_probabilities
from titan_loop.inference.packed import pack
from titan_loop.inference.rows import Batch, GeneratedToken, Request, Row, draw_rows
from titan_loop.inference.sampling import Sampling, probabilities
from titan_loop.inference.stack import Stack
from titan_loop.models.decoder import LoopDecoder

TRACED_TOKENS = 5
Problem = Literal["time", "gone", "stopping", "failure"]
Likely = list[tuple[int, float]]
"""Tokens with their probabilities, or log-probabilities in nats, the likeliest first."""


class RefusedError(UserError):
    """A request that is not answered: the field at fault, and HTTP's status."""

    def __init__(self, problem: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(problem)
        self.field, self.status = field, status


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """Settings of one row.

    Attributes:
        logprobs: Number of likeliest tokens whose log-probabilities are told; None for none at all.
        traced: Whether the likeliest tokens and the exit probability of every step are told.
    """

    recurrent_steps: int
    exit_policy: ExitPolicy = field(default_factory=StaticStep)
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    traced: bool = False

    @property
    def deepest_step(self) -> int:
        """Last step that may run; `UserError` if the policy names a later one than R."""
        return self.exit_policy.deepest_step(self.recurrent_steps)


class StepReading(NamedTuple):
    """What one step says of the next token; `exit_probability` is None without a gate."""

    likely: Likely
    exit_probability: float | None


class LogProbs(NamedTuple):
    """Log-probabilities of a token and of the likeliest ones, before temperature and top-p."""

    own: float
    likely: Likely


class Piece(NamedTuple):
    """What a row sends when one of its tokens leaves, or when it ends without one.

    Attributes:
        event: The token; None for a row that ended without one.
        problem: Why the row ended before its time.
        flops: Forward FLOPs of the token.
        trace: Readings of the steps that the token ran.
        text: What was held back in a row that ended without a token.
    """

    event: GeneratedToken | None
    problem: Problem | None = None
    logprobs: LogProbs | None = None
    trace: Sequence[StepReading] = ()
    flops: float = 0.0
    text: str = ""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.event is None or self.event.finish is not None


class ServedRow(Row):
    """One answer, from the queue to its last token.

    Args:
        send: Receives the pieces in the engine's thread.
        flops: Cost of a token by settings, step and position: `ServingEngine.flops`.
        deadline: `time.monotonic()` at which the row ends.

    Attributes:
        settings: Of the token that is being computed.
        wanted: Settings of the next token; other threads may assign them.
        cancelled: Set by other threads when nobody reads the answer any more.
    """

    def __init__(
        self,
        request: Request,
        settings: RowSettings,
        *,
        context_tokens: int,
        seed: int,
        send: Callable[[Piece], None],
        flops: Callable[[RowSettings, int, int], float],
        deadline: float,
    ) -> None:
        super().__init__(0, request, context_tokens=context_tokens, seed=seed)
        self.settings = self.wanted = settings
        self.deadline = deadline
        self.cancelled = False
        self.trace: list[StepReading] = []
        self.logprobs: LogProbs | None = None
        self._send, self._flops = send, flops

    def accept(self, token: int, step: int) -> GeneratedToken:
        """Go on with a token, and send it; from here on the wanted settings hold."""
        event = super().accept(token, step)
        flops = self._flops(self.settings, step, self.position)
        # A prompt's last token runs all steps, whichever it leaves after.
        self._send(Piece(event, None, self.logprobs, self.trace[:step], flops))
        self.settings = self.wanted
        return event

    def end(self, problem: Problem) -> None:
        """End before the next token."""
        self.finish = "limit"
        stream = self._request.text
        self._send(Piece(None, problem, text="" if stream is None else stream.rest()))


class RowDecider(ExitDecider):
    """Applies every row's own policy, and takes the readings of rows that are traced."""

    def __init__(self, stack: Stack, rows: Sequence[ServedRow]) -> None:
        deepest = max((row.settings.deepest_step for row in rows), default=0)
        super().__init__(StaticStep(), deepest, gate=stack.gate, readout=stack.readout)
        self.rows = rows
        self._has_gate = stack.model.exit_gate is not None

    @property
    def log_prob(self) -> None:
        """None, since only some rows compute it; families that need it read the state again."""
        return

    def reads(self, steps: Iterable[int]) -> bool:
        """Return whether a row's policy, head or trace reads a state after its step."""
        steps = [*steps]
        if len(steps) != len(self.rows):  # rows of one prompt pass share their step
            steps *= len(self.rows)
        return any(
            row.settings.traced
            or row.settings.exit_policy.reads_states
            or step >= row.settings.deepest_step
            for row, step in zip(self.rows, steps, strict=True)
        )

    def draws(self, row: object) -> bool:
        """Return whether a row's own policy needs a random number for each token."""
        return cast(ServedRow, row).settings.exit_policy.draws

    def decide(
        self,
        step_BL: Tensor,
        hidden_BLD: Tensor,
        before_BLD: Tensor,
        share_BL: Tensor | None = None,
    ) -> Tensor:
        """Return (B, 1) bool, True where the row's token leaves."""
        settings = [row.settings for row in self.rows]
        traced = any(each.traced for each in settings)
        evidence = self.evidence(
            *(step_BL, hidden_BLD, before_BLD),
            reads_gate=self._has_gate
            and (traced or any(each.exit_policy.reads_gate for each in settings)),
            reads_logits=traced or any(each.exit_policy.reads_logits for each in settings),
        )
        evidence = evidence._replace(share_BL=share_BL)
        deepest = [each.deepest_step for each in settings]
        leaves_BL = step_BL >= torch.tensor(deepest, device=step_BL.device).unsqueeze(1)
        for policy in {each.exit_policy for each in settings}:
            has = torch.tensor([each.exit_policy == policy for each in settings])
            leaves_BL |= has.to(step_BL.device).unsqueeze(1) & policy.fires(evidence)
        if traced:
            self._trace(step_BL[:, 0].tolist(), evidence.log_prob_BLV, evidence.log_survival_BL)
        return leaves_BL

    def _trace(
        self, steps: list[int], log_prob_BLV: Tensor | None, log_survival_BL: Tensor | None
    ) -> None:
        assert log_prob_BLV is not None
        chosen = [index for index, row in enumerate(self.rows) if row.settings.traced]
        count = min(TRACED_TOKENS, log_prob_BLV.shape[-1])
        top = log_prob_BLV[chosen, 0].topk(count)
        likely = zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
        for index, (tokens, shares) in zip(chosen, likely, strict=True):
            row = self.rows[index]
            if steps[index] == 1:
                row.trace = []
            exit_probability = None
            if log_survival_BL is not None:
                gone = sum(reading.exit_probability or 0.0 for reading in row.trace)
                exit_probability = 1.0 - gone - float(log_survival_BL[index, 0].exp())
            row.trace.append(StepReading([*zip(tokens, shares, strict=True)], exit_probability))


class ServedBatch(Batch):
    """A batch whose rows sample in their own ways."""

    def sample(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[int]:
        served = cast(Sequence[ServedRow], rows)
        tokens = logits_BV.argmax(-1).tolist()
        kinds = {row.settings.sampling for row in served}
        for sampling in (kind for kind in kinds if kind.temperature > 0.0):
            places = [i for i, row in enumerate(served) if row.settings.sampling == sampling]
            weight_BV = probabilities(logits_BV[places], sampling)
            drawn = draw_rows(weight_BV, [served[place] for place in places])
            for place, token in zip(places, drawn, strict=True):
                tokens[place] = token
        for row, token, logits_V in zip(served, tokens, logits_BV, strict=True):
            row.logprobs = None
            if (count := row.settings.logprobs) is not None:
                log_prob_V = log_probabilities(logits_V)
                top = log_prob_V.topk(min(count, len(log_prob_V)))
                likely = [*zip(top.indices.tolist(), top.values.tolist(), strict=True)]
                row.logprobs = LogProbs(float(log_prob_V[token]), likely)
        return tokens

    def admit(self, rows: Sequence[Row]) -> None:
        super().admit([*rows])
        self._show_rows()

    def drop_finished(self) -> None:
        super().drop_finished()
        self._show_rows()

    def _show_rows(self) -> None:
        assert isinstance(self.decider, RowDecider)
        self.decider.rows = cast(Sequence[ServedRow], self.rows)


class ServingEngine(Engine):
    """An engine whose rows come and go; `recurrent_steps` is the deepest that one may ask for."""

    def __init__(
        self,
        model: LoopDecoder,
        *,
        recurrent_steps: int,
        kv_cache: str = "full",
        compile: bool = False,
    ) -> None:
        super().__init__(model, recurrent_steps=recurrent_steps, kv_cache=kv_cache, compile=compile)
        self.stack.packed = pack(model)
        self._costs: dict[int, tuple[float, float]] = {}

    def batch(self, rows: int, cache: LoopCache | None = None) -> ServedBatch:
        """Return a batch with memory for `rows` rows as long as the context.

        A `cache` that exists already is used again, and what it holds is forgotten.
        """
        require_at_least(1, rows=rows)
        stack, steps = self.stack, self.recurrent_steps
        if cache is None:
            room = {"rows": rows, "capacity": stack.context_tokens}
            cache = stack.make_cache(self._strategy, steps=steps, **room)
        cache.select([])
        return ServedBatch(
            stack=stack,
            rows=[],
            cache=cache,
            decider=RowDecider(stack, []),
            sampling=Sampling(),
            recurrent_steps=steps,
            captured=None if self._hooked else self._captured(cache),
        )

    def check(self, settings: RowSettings, prompt: Sequence[int]) -> None:
        """Raise `UserError` for a row that cannot run."""
        self._check_prompt("the prompt", prompt)
        require_at_least(1, recurrent_steps=settings.recurrent_steps)
        if settings.recurrent_steps > self.recurrent_steps:
            raise UserError(
                f"recurrent_steps={settings.recurrent_steps} is above the {self.recurrent_steps} "
                "that this server has memory for; it was started with --recurrent-steps"
            )
        policy = settings.exit_policy
        require_exit_policy(self.stack.model, policy)
        assert settings.deepest_step

    def join(self, batch: ServedBatch, rows: Sequence[ServedRow]) -> Iterator[GeneratedToken]:
        """Run the prompts of rows of one depth; yield their first tokens."""
        first, deepest = batch.cache.rows, rows[0].settings.deepest_step
        yield from self._admit(batch, [*rows])
        # Deeper steps, which a row may ask for later, see what the last one left.
        batch.cache.leave_prompt(first, max(len(row.prompt) for row in rows), deepest)

    def flops(self, settings: RowSettings, step: int, position: int) -> float:
        """Return the forward FLOPs of a token that left after `step` and sees `position` keys."""
        config, policy = self.stack.model.config, settings.exit_policy
        if step not in self._costs:  # it takes longer than a small model's step
            parts = config.training_flops(1, step, trainable="exit_gate")
            self._costs[step] = parts.matrices + parts.decoding, parts.attention
        fixed, per_key = self._costs[step]
        readouts = 2 * config.dim * config.vocab_size * (step if policy.reads_logits else 1)
        gate = 2 * config.dim * step if policy.reads_gate else 0
        return fixed + per_key * position + readouts + gate

    def cache_bytes(self, settings: RowSettings, tokens: int) -> int:
        """Return the bytes of keys and values of so many tokens at a row's depth."""
        stack = self.stack
        shape = stack.cache_shape(steps=settings.deepest_step, rows=1, capacity=tokens)
        width = shape.heads * shape.head_dim * stack.dtype.itemsize
        return 2 * self._strategy.entries(shape) * width

    def _decider(self, rows: Sequence[Row]) -> RowDecider:
        return RowDecider(self.stack, cast(Sequence[ServedRow], rows))
