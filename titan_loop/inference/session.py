"""A conversation with a model, or one completion after another, streamed token by token.

prompt ─ chat: the turns so far ─► requests ─► Engine.stream ─► tokens, to the terminal
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from titan_loop.inference.engine import Engine
from titan_loop.inference.loading import Loaded, text_ends
from titan_loop.inference.rows import Completion, GeneratedToken, text_requests
from titan_loop.inference.sampling import Sampling
from titan_loop.text.chatml import ASSISTANT, Turn, chat_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Session:
    """Completes prompts with one model; in a chat it remembers the turns."""

    def __init__(
        self,
        engine: Engine,
        loaded: Loaded,
        tokenizer: "Tokenizer",
        *,
        sampling: Sampling,
        seed: int = 0,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        chat: bool = False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._stop = stop
        self._chat = chat
        self._ends = text_ends(loaded, tokenizer)
        self._generator = torch.Generator().manual_seed(seed)
        self._turns: list[Turn] = []
        self.context_tokens = engine.stack.context_tokens
        self.knows_chats = loaded.run.text_format(tokenizer).turn_end is not None

    def answer(self, prompt: str) -> Iterator[GeneratedToken]:
        """Stream one completion, or the answer to one turn of the chat."""
        if not self._chat:
            yield from self.complete([prompt])
            return
        self._turns.append(Turn("user", prompt))
        completion = Completion()
        for event in self.complete([chat_prompt(self._tokenizer, self._turns)]):
            completion.add(event)
            yield event
        self._turns.append(Turn(ASSISTANT, completion.text))

    def complete(self, prompts: Sequence[str | list[int]]) -> Iterator[GeneratedToken]:
        """Stream the completions of several prompts, side by side; an empty one begins a text."""
        end = self._ends.end_of_text
        beginning = [] if end is None else [end]  # a text of its own begins after the last one
        requests = text_requests(
            self._tokenizer,
            [prompt or beginning for prompt in prompts],
            stop_tokens=self._ends.stop_tokens,
            max_new_tokens=self._max_new_tokens,
            stop=self._stop,
        )
        return self._engine.stream(requests, sampling=self._sampling, generator=self._generator)

    def summary(self, completions: Sequence[Completion]) -> list[str]:
        """Return the cost of completions, as phrases."""
        engine = self._engine
        steps = [step for completion in completions for step in completion.steps]
        mean = sum(steps) / len(steps) if steps else float("nan")
        phrases = [
            f"mean exit step {mean:.2f} of {engine.recurrent_steps}",
            f"cache {engine.work.cache_bytes / 1e6:.2f} MB ({engine.kv_cache})",
        ]
        if engine.speculation is not None:
            phrases.append(f"accepted {engine.speculation.acceptance:.0%} of the drafts")
        return phrases
