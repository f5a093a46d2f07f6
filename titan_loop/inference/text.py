"""Text in, text out: the engine with a tokenizer around it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from titan_loop.inference.detokenizer import Detokenizer
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Completion, GeneratedToken, Request
from titan_loop.inference.sampling import Sampling
from titan_loop.text.tokenizer import check_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextEngine:
    """Completes text.

    Args:
        engine: Generates tokens.
        tokenizer: The one the model was trained with.
        stop_tokens: Tokens that end every completion, as `loading.text_ends` finds them.

    Raises:
        UserError: The tokenizer has tokens the model does not know.
    """

    def __init__(self, engine: Engine, tokenizer: "Tokenizer", stop_tokens: frozenset[int]) -> None:
        check_vocabulary(tokenizer, engine.stack.model.config.vocab_size, "of this text")
        self.engine = engine
        self.tokenizer = tokenizer
        self._stop_tokens = stop_tokens

    def stream(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        rows: int | None = None,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[GeneratedToken]:
        """Generate, yielding each token with the text it makes certain.

        Args:
            prompts: Texts, in which special tokens are recognised, or token ids.
            max_new_tokens: At most this many tokens a prompt.
            stop: Strings that end a completion, which does not include them. The stop tokens end it
                too.
            rows: How many run at once, as in `Engine.stream`.
            sampling: How tokens are chosen; None is greedy.
            generator: As in `Engine.stream`.

        Raises:
            UserError: As `Engine.stream`, or an empty stop string.
        """
        requests = [
            Request(
                prompt=self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt,
                max_new_tokens=max_new_tokens,
                stop_tokens=self._stop_tokens,
                text=Detokenizer(self.tokenizer, stop),
            )
            for prompt in prompts
        ]
        return self.engine.stream(requests, rows=rows, sampling=sampling, generator=generator)

    def complete(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        rows: int | None = None,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> list[Completion]:
        """Generate and return everything at the end; arguments as in `stream`."""
        completions = [Completion() for _ in prompts]
        for event in self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            stop=stop,
            rows=rows,
            sampling=sampling,
            generator=generator,
        ):
            completions[event.row].add(event)
        return completions
