"""`titan-loop generate CHECKPOINT`: complete prompts or chat in the terminal, token by token."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from titan_loop.inference.engine import Engine
    from titan_loop.inference.rows import Completion, GeneratedToken

_LARGEST_SEED = 2**64 - 1  # of torch.Generator
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts and settings of the generation.

    Attributes:
        prompt: Text to complete; repeat the flag for a batch. An empty one begins a text.
        chat: Treat lines as turns of a ChatML chat.
        max_new_tokens: Most tokens per completion.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the most likely tokens that make up the share p.
        seed: Seed of everything that is sampled.
        stop: String that ends the text; may be repeated.
        recurrent_steps: Number of recurrent steps R; by default that of training.
        exit: Exit policy: full, static:S, hidden:EPSILON, relative:EPSILON,
            confidence:P, q:THRESHOLD or kl:KL,NATS.
        kv_cache: Key-value cache: full, last, first or averaged.
        draft_step: Draft at this recurrent step, verify at R.
        draft_tokens: Number of tokens drafted at a time.
        show_steps: Write each token's exit step.
        tokenizer: A tokenizer.json; by default that of the source.
        context: Context in tokens; by default the trained window.
        dtype: Type of the weights.
    """

    prompt: UseAppendAction[tuple[str, ...]] = ()
    chat: bool = False
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: UseAppendAction[tuple[str, ...]] = ()
    recurrent_steps: int | None = None
    exit: str = "full"
    kv_cache: str = "full"
    draft_step: int | None = None
    draft_tokens: int = 3
    show_steps: bool = False
    tokenizer: str | None = None
    context: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"

    def check(self) -> None:
        """Raise `UserError` for what cannot work or has no effect, before anything is loaded."""
        for name in ("max_new_tokens", "recurrent_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise UserError(f"seed={self.seed} must be between 0 and {_LARGEST_SEED}")
        for text in (*self.prompt, *self.stop):
            _require_text(text)
        if self.chat and len(self.prompt) > 1:
            raise UserError("--chat takes one --prompt, or lines of standard input")
        without = {"draft_tokens": "--draft-step"} if self.draft_step is None else {}
        if self.temperature == 0:
            without |= dict.fromkeys(("top_k", "top_p"), "a --temperature above 0")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in without and value != field.default:
                raise UserError(f"{field.name}={value} has no effect without {without[field.name]}")


def generate(checkpoint: Path, given: Generation, *, stage: str | None = None) -> None:
    """Complete prompts, or chat, with a checkpoint.

    Without --prompt, every line of standard input is a prompt.

    Args:
        checkpoint: Folder of a checkpoint, of a run for its newest one, or of a recipe for its
            newest stage.
        given: Prompts and settings.
        stage: Stage of that recipe.
    """
    given.check()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
    import torch

    from titan_loop.inference.cache import cache_strategy
    from titan_loop.inference.engine import Engine
    from titan_loop.inference.exit_policy import parse_exit_policy
    from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
    from titan_loop.inference.rows import text_requests
    from titan_loop.inference.sampling import Sampling
    from titan_loop.inference.speculative import SelfSpeculation
    from titan_loop.runs.recipe_folder import chosen_run

    policy = parse_exit_policy(given.exit)
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    cache_strategy(given.kv_cache)
    loaded = load_checkpoint(
        chosen_run(checkpoint, stage),
        use="generate",
        context_tokens=given.context,
        device=compat.device_type(),
        dtype=getattr(torch, given.dtype),
    )
    steps = loaded.recurrent_steps if given.recurrent_steps is None else given.recurrent_steps
    speculation = None
    if given.draft_step is not None:
        speculation = SelfSpeculation(given.draft_step, given.draft_tokens)
    engine = Engine(
        loaded.model,
        recurrent_steps=steps,
        kv_cache=given.kv_cache,
        exit_policy=policy,
        speculation=speculation,
    )
    tokenizer = load_matching_tokenizer(loaded, given.tokenizer)
    generator = torch.Generator().manual_seed(given.seed)

    ends = text_ends(loaded, tokenizer)
    if given.chat and loaded.run.text_format(tokenizer).turn_end is None:
        print(
            "[this model was not trained on conversations: it continues the text of the chat]",
            file=sys.stderr,
        )

    def stream(prompts: list[str] | list[list[int]]) -> "Iterator[GeneratedToken]":
        beginning = [] if ends.end_of_text is None else [ends.end_of_text]
        requests = text_requests(
            tokenizer,
            [prompt or beginning for prompt in prompts],  # a text of its own begins after the last
            stop_tokens=ends.stop_tokens,
            max_new_tokens=given.max_new_tokens,
            stop=given.stop,
        )
        return engine.stream(requests, sampling=sampling, generator=generator)

    session = _Session(engine, tokenizer, stream, given)
    if len(given.prompt) > 1:
        session.complete_all(list(given.prompt))
    else:
        for prompt in given.prompt or _lines():
            session.answer(prompt)


class _Session:
    """Prints completions and, in a chat, remembers the turns."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: "Tokenizer",
        stream: "Callable[[list[str] | list[list[int]]], Iterator[GeneratedToken]]",
        given: Generation,
    ) -> None:
        from titan_loop.text.chatml import Turn

        self._engine = engine
        self._tokenizer = tokenizer
        self._stream = stream
        self._given = given
        self._turns: list[Turn] = []

    def answer(self, prompt: str) -> None:
        """Stream one completion, or one turn of the chat."""
        from titan_loop.inference.rows import Completion
        from titan_loop.text.chatml import ASSISTANT, Turn, chat_prompt

        start = time.perf_counter()
        completion = Completion()
        prompts: list[str] | list[list[int]] = [prompt]
        if self._given.chat:
            self._turns.append(Turn("user", prompt))
            prompts = [chat_prompt(self._tokenizer, self._turns)]
        for event in self._stream(prompts):
            completion.add(event)
            print(self._shown(event.text, event.step), end="", flush=True)
        print(flush=True)
        self._summarise([completion], time.perf_counter() - start)
        if self._given.chat:
            self._turns.append(Turn(ASSISTANT, completion.text))

    def complete_all(self, prompts: list[str]) -> None:
        """Complete several prompts in one batch and print them one after the other."""
        from titan_loop.inference.rows import Completion

        start = time.perf_counter()
        completions = [Completion() for _ in prompts]
        shown = [""] * len(prompts)
        for event in self._stream(prompts):
            completions[event.row].add(event)
            shown[event.row] += self._shown(event.text, event.step)
        for prompt, text in zip(prompts, shown, strict=True):
            print(f"=== {prompt}\n{text}")
        self._summarise(completions, time.perf_counter() - start)

    def _shown(self, text: str, step: int) -> str:
        return text + str(step).translate(_SUBSCRIPTS) if self._given.show_steps else text

    def _summarise(self, completions: "list[Completion]", seconds: float) -> None:
        engine = self._engine
        steps = [step for completion in completions for step in completion.steps]
        mean = sum(steps) / len(steps) if steps else float("nan")
        parts = [
            f"{len(steps)} tokens in {seconds:.1f} s",
            f"mean exit step {mean:.2f} of {engine.recurrent_steps}",
            f"cache {engine.work.cache_bytes / 1e6:.2f} MB ({self._given.kv_cache})",
        ]
        if engine.speculation is not None:
            parts.append(f"accepted {engine.speculation.acceptance:.0%} of the drafts")
        print(f"[{', '.join(parts)}]", file=sys.stderr)
        if any(completion.finish == "context" for completion in completions):
            print(
                f"[ended at the context of {engine.stack.context_tokens} tokens, by default the "
                "trained window; --context gives it another]",
                file=sys.stderr,
            )


def _lines() -> Iterator[str]:
    """Yield the lines of standard input, with a prompt if it is a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield _require_text(line.rstrip("\n"))


def _require_text(text: str) -> str:
    """Return it, or raise `UserError` if it came from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"prompt {text!r:.60} is not UTF-8; convert it") from error
    return text


run = command("generate", generate)
