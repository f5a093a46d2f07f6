"""Generation: prompts in, tokens out, at any depth and with any exit policy.

    requests ─► free places? ─► their prompts through all recurrent steps ─► first tokens ─┐
             ┌─► `Batch.advance`, or a round of `SelfSpeculation` ◄────────────────────────┘
             └── until no row is left; finished rows free their places

The prompt runs to the deepest step the policy can reach, because sharing or skipping there costs
quality (Ouro §5.4.2). With `prefill_steps` it runs fewer, and a generated token's deeper steps see
the keys of the last step that the prompt ran.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from titan_loop.distributed.compiler import missing_compiler
from titan_loop.errors import UserError, require_at_least
from titan_loop.inference.cache import LoopCache, cache_strategy
from titan_loop.inference.captured import CapturedVisits, rounded_tokens
from titan_loop.inference.exit_decider import ExitDecider
from titan_loop.inference.exit_policy import ExitPolicy, StaticStep, require_exit_policy
from titan_loop.inference.rows import Batch, Completion, GeneratedToken, Request, Row
from titan_loop.inference.sampling import Sampling
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.inference.stack import Stack, Work
from titan_loop.models.decoder import LoopDecoder

logger = logging.getLogger(__name__)


def require_prefill_steps(prefill_steps: int | None, recurrent_steps: int) -> None:
    """Raise `UserError` unless prompts run 1 step or more, and no more than generated tokens."""
    require_at_least(1, prefill_steps=prefill_steps)
    if prefill_steps is not None and prefill_steps > recurrent_steps:
        raise UserError(
            f"prefill_steps={prefill_steps} is above the {recurrent_steps} recurrent steps of "
            "generated tokens; lower it"
        )


class Engine:
    """Generates with a looped model.

    Args:
        recurrent_steps: Number of recurrent steps R, which may exceed the trained R; None takes the
            model's.
        kv_cache: Strategy for the keys and values of earlier tokens: full, last, first, averaged
            or one of the family's own.
        exit_policy: Rule for the step after which a token is read; None reads all after step R.
        prefill_steps: Number of recurrent steps P of the prompts, at most R; None for R. The last
            token of a prompt then runs again as a generated one does.
        speculation: Drafting with shallow steps; needs full depth and the full cache.
        compile: Compile the visits of generated tokens, for a CPU: `compiled.py`.
    """

    def __init__(
        self,
        model: LoopDecoder,
        *,
        recurrent_steps: int | None = None,
        kv_cache: str = "full",
        exit_policy: ExitPolicy | None = None,
        prefill_steps: int | None = None,
        speculation: SelfSpeculation | None = None,
        compile: bool = False,
    ) -> None:
        steps = model.recurrent_steps if recurrent_steps is None else recurrent_steps
        require_at_least(1, recurrent_steps=steps)
        self.stack = Stack(model)
        self.exit_policy = exit_policy or StaticStep()
        # Steps that a policy can never reach need no cache.
        self.recurrent_steps = self.exit_policy.deepest_step(steps)
        require_prefill_steps(prefill_steps, self.recurrent_steps)
        self.prefill_steps = prefill_steps
        self.speculation = speculation
        self.kv_cache = kv_cache
        self._strategy = cache_strategy(kv_cache, model.config.family)
        require_exit_policy(model, self.exit_policy)
        if speculation is not None:
            speculation.check(self.recurrent_steps)
            self.stack.drafts = speculation.draft_tokens
            if kv_cache != "full":
                raise UserError(
                    f"kv_cache={kv_cache}: drafts can be verified with kv_cache=full only"
                )
            if not isinstance(self.exit_policy, StaticStep):
                raise UserError("draft_step verifies at a fixed depth; leave out exit")
            if compile:
                raise UserError("compile has no effect with draft_step; leave out one of them")
        self.stack.compiles = compile and self._can_compile()
        self.stack.captures |= self.stack.compiles
        self._idle: tuple[LoopCache, CapturedVisits, list[int]] | None = None

    @property
    def work(self) -> Work:
        """Cost of the latest stream so far."""
        return self.stack.work

    @torch.inference_mode()  # saves a tenth of a small model's time
    def stream(
        self,
        requests: Sequence[Request],
        *,
        rows: int | None = None,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[GeneratedToken]:
        """Generate, yielding each token as soon as its row leaves the recurrence.

        Args:
            rows: Number of rows that run at once, by default all; the other requests wait, in
                order, for a place. Results are the same up to rounding.
            sampling: Choice of tokens; None is greedy.
            generator: A CPU generator that seeds the rows whose request has no seed; required for
                these unless greedy.
        """
        sampling = sampling or Sampling()
        waiting = self._rows(requests, sampling, generator)
        places = len(waiting) if rows is None else min(rows, len(waiting))
        require_at_least(1, rows=rows)
        self.stack.work = Work()
        longest = max(len(row.prompt) + row.remaining for row in waiting)
        cache, captured = self._memory(places, longest)
        batch = Batch(
            stack=self.stack,
            rows=[],
            cache=cache,
            decider=self._decider([]),
            sampling=sampling,
            recurrent_steps=self.recurrent_steps,
            captured=None if self._hooked else captured,
        )
        try:
            while waiting or batch.rows:
                free = places - len(batch.rows)
                if waiting and free:
                    if self.prefill_steps is None:
                        yield from self._admit(batch, waiting[:free])
                    else:
                        self._prefill(batch, waiting[:free], self.prefill_steps)
                    waiting = waiting[free:]
                elif self.speculation is None:
                    yield from batch.advance()
                else:
                    yield from self.speculation.advance(batch)
                batch.drop_finished()
        finally:  # also of a stream that is left early
            if captured is not None and self.stack.compiles:
                self._idle = cache, captured, self._weights

    def complete(
        self,
        requests: Sequence[Request],
        *,
        rows: int | None = None,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> list[Completion]:
        """Generate and return everything at the end; arguments as in `stream`."""
        completions = [Completion() for _ in requests]
        for event in self.stream(requests, rows=rows, sampling=sampling, generator=generator):
            completions[event.row].add(event)
        return completions

    def _can_compile(self) -> bool:
        """Return whether visits can be compiled; log why not."""
        device = self.stack.device.type
        if device != "cpu":
            logger.warning("compile has no effect on %s, which replays visits anyway", device)
        elif missing := missing_compiler(device):
            logger.warning("compile: %s found; running eagerly", missing)
        else:
            return True
        return False

    def _memory(self, rows: int, capacity: int) -> tuple[LoopCache, CapturedVisits | None]:
        """Return an empty cache and its visits, which outlive a stream where they are compiled."""
        idle, self._idle = self._idle, None  # a second stream at the same time makes its own
        if idle is not None and idle[2] == self._weights:
            cache, captured, _ = idle
            if cache.shape.rows >= rows and cache.shape.capacity >= capacity:
                cache.select([])
                self.stack.work.cache_bytes = cache.allocated_bytes
                return cache, captured
        if self.stack.compiles:
            capacity = min(rounded_tokens(capacity), self.stack.context_tokens)
        cache = self.stack.make_cache(
            self._strategy, steps=self.recurrent_steps, rows=rows, capacity=capacity
        )
        return cache, self._captured(cache)

    @property
    def _weights(self) -> list[int]:
        """Addresses of the weights, where compiled visits read them."""
        return [weight.data_ptr() for weight in self.stack.model.parameters()]

    @property
    def _hooked(self) -> bool:
        """Whether hooks want to see each visit."""
        return any(m._forward_hooks or m._forward_pre_hooks for m in self.stack.model.modules())

    def _captured(self, cache: LoopCache) -> CapturedVisits | None:
        """Return graphs for the visits of a cache, where they pay."""
        return CapturedVisits(self.stack, cache) if self.stack.captures else None

    def _rows(
        self, requests: Sequence[Request], sampling: Sampling, generator: torch.Generator | None
    ) -> list[Row]:
        if not requests:
            raise UserError("no prompt was given: give at least one")
        for index, request in enumerate(requests):
            self._check_prompt(f"prompt {index}", request.prompt)
            require_at_least(1, max_new_tokens=request.max_new_tokens)
        if generator is None:
            if sampling.temperature > 0.0 and any(request.seed is None for request in requests):
                raise UserError(f"temperature={sampling.temperature} needs a generator; give one")
            seeds = [0] * len(requests)
        else:
            seeds = torch.randint(2**62, (len(requests),), generator=generator).tolist()
        context = self.stack.context_tokens
        return [
            Row(
                index,
                request,
                context_tokens=context,
                seed=seed if request.seed is None else request.seed,
            )
            for index, (request, seed) in enumerate(zip(requests, seeds, strict=True))
        ]

    def _check_prompt(self, name: str, prompt: Sequence[int]) -> None:
        context, vocabulary = self.stack.context_tokens, self.stack.model.config.vocab_size
        if not prompt:
            raise UserError(f"{name} is empty: give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"{name} has {len(prompt)} tokens, the context of {context} leaves no room for "
                "another; shorten it"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise UserError(
                f"{name} has token {max(prompt, key=abs)}, the model's vocabulary has "
                f"{vocabulary}; use the tokenizer it was trained with"
            )

    def _admit(self, batch: Batch, rows: list[Row]) -> Iterator[GeneratedToken]:
        """Run the prompts of new rows through all steps; yield their first tokens."""
        decider = self._decider(rows)
        left = torch.zeros((len(rows), 1), dtype=torch.int64, device=self.stack.device)
        read_BLD: Tensor | None = None
        states = self._prompt_states(batch, rows, decider.deepest_step, decider.reads)
        share_BL = batch.shares(rows, decider)
        for step, state_BLD, before_BLD in states:
            leaves = decider.decide(torch.full_like(left, step), state_BLD, before_BLD, share_BL)
            leaves &= left == 0
            left = torch.where(leaves, step, left)
            if read_BLD is None:
                read_BLD = state_BLD
            read_BLD = torch.where(leaves.unsqueeze(-1), state_BLD, read_BLD)
        assert read_BLD is not None
        batch.admit(rows)
        tokens = batch.sample(self.stack.readout(read_BLD)[:, 0], rows)
        for row, token, step in zip(rows, tokens, left[:, 0].tolist(), strict=True):
            yield row.accept(token, step)

    def _prefill(self, batch: Batch, rows: list[Row], steps: int) -> None:
        """Run the prompts of new rows through P steps; their last tokens begin again at step 1."""
        first = batch.cache.rows
        for _ in self._prompt_states(batch, rows, steps, lambda now: steps in now):
            pass
        batch.cache.leave_prompt(first, max(len(row.prompt) for row in rows), steps)
        for row in rows:
            row.token = row.prompt[-1]
        batch.admit(rows)

    def _prompt_states(
        self,
        batch: Batch,
        rows: list[Row],
        recurrent_steps: int,
        reads: Callable[[Sequence[int]], bool],
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (step, state after it, state before it) of each prompt's last token, as read."""
        visit = batch.cache.admit([len(row.prompt) for row in rows])
        prompts = [torch.tensor(row.prompt, device=self.stack.device) for row in rows]
        row_B = torch.arange(len(prompts), device=self.stack.device)
        last_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.stack.device)
        tokens_BL = pad_sequence(prompts, batch_first=True)
        prefix_B = torch.tensor([row.prefix_tokens for row in rows], device=self.stack.device)
        context = self.stack.prompt_context(tokens_BL, last_B + 1, visit, prefix_B=prefix_B)
        state = None
        before_BLD: Tensor | None = None
        for step in range(1, recurrent_steps + 1):
            steps = [step] * len(prompts)
            state = self.stack.step(state, tokens_BL, steps, context, reads=reads([step]))
            state_BLD = state.read_BLD[row_B, last_B].unsqueeze(1)
            yield step, state_BLD, state_BLD if before_BLD is None else before_BLD
            before_BLD = state_BLD

    def _decider(self, rows: Sequence[Row]) -> ExitDecider:
        """Return the decider of rows that start, which a subclass may let differ."""
        return ExitDecider(
            self.exit_policy, self.recurrent_steps, gate=self.stack.gate, readout=self.stack.readout
        )
