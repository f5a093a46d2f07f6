"""Text in, text out: the engine with a tokenizer around it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from titan_loop.inference.engine import Engine
from titan_loop.inference.loading import check_vocabulary
from titan_loop.inference.request import Completion, GeneratedToken, Request
from titan_loop.inference.sampling import Sampling
from titan_loop.inference.text_stream import TextStream
from titan_loop.text.chatml import ASSISTANT, TURN_END, Turn, control_tokens
from titan_loop.text.tokenizer import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextEngine:
    """Completes text.

    Args:
        engine: Generates tokens.
        tokenizer: The one the model was trained with.

    Raises:
        UserError: The tokenizer has tokens the model does not know.
    """

    def __init__(self, engine: Engine, tokenizer: "Tokenizer") -> None:
        check_vocabulary(tokenizer, engine.stack.model.config.vocab_size, "of this text")
        self.engine = engine
        self.tokenizer = tokenizer
        ends = (tokenizer.token_to_id(name) for name in (END_OF_TEXT, TURN_END))
        self._stop_tokens = frozenset(token for token in ends if token is not None)

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
            stop: Strings that end a completion and are no part of it, as the tokens for the end of
                a text and of a turn always do.
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
                text=TextStream(self.tokenizer, stop),
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


def chat_prompt(tokenizer: "Tokenizer", turns: Sequence[Turn]) -> list[int]:
    """Return a conversation in ChatML, up to where the assistant begins to speak, as token ids.

    Control tokens come from the template alone; one that is spelt out in a turn stays text.

    Args:
        tokenizer: Has the control tokens.
        turns: What has been said.

    Raises:
        UserError: The tokenizer lacks a control token.
    """
    control = control_tokens(tokenizer, END_OF_TEXT)
    recognised = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # which means: as text

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    try:
        newline, prompt = encode("\n"), []
        for role, content in turns:
            # As in training: what the assistant says is encoded apart from the header before it.
            spoken = role == ASSISTANT
            said = encode(f"{role}\n") + encode(content) if spoken else encode(f"{role}\n{content}")
            prompt += [control.turn_start, *said, control.turn_end, *newline]
        return [*prompt, control.turn_start, *encode(f"{ASSISTANT}\n")]
    finally:
        tokenizer.encode_special_tokens = recognised
