"""`titan-loop generate CHECKPOINT`: complete prompts or chat in the terminal, token by token."""

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError, require_at_least

if TYPE_CHECKING:
    from titan_loop.inference.session import Session

_LARGEST_SEED = 2**64 - 1  # of torch.Generator
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts and settings of the generation.

    Attributes:
        prompt: Text to complete; repeat the flag for a batch. An empty one begins a text.
        chat: Treat lines as turns of a ChatML chat.
        max_new_tokens: Maximum number of tokens per completion.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the most likely tokens that make up the share p.
        seed: Seed of everything that is sampled.
        stop: String that ends the text; may be repeated.
        recurrent_steps: Number of recurrent steps R; by default the trained one.
        exit: Exit policy: full, static:S, hidden:EPSILON, fixed_point:EPSILON, margin:EPSILON,
            confidence:P, q:THRESHOLD, kl:KL,NATS or contrast:STEP,STRENGTH,SHARE.
        kv_cache: Key-value cache: full, last, first or averaged.
        prefill_steps: Number of recurrent steps of prompts; by default as of generated tokens.
        draft_step: Draft at this recurrent step, verify at R.
        draft_tokens: Number of tokens drafted at a time.
        show_steps: Write each token's exit step.
        tokenizer: A tokenizer.json; by default the source's.
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
    prefill_steps: int | None = None
    draft_step: int | None = None
    draft_tokens: int = 3
    show_steps: bool = False
    tokenizer: str | None = None
    context: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"

    def check(self) -> None:
        """Raise `UserError` for settings that cannot work or have no effect, before loading."""
        require_at_least(1, max_new_tokens=self.max_new_tokens)
        require_at_least(1, recurrent_steps=self.recurrent_steps, prefill_steps=self.prefill_steps)
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


@command("generate")
def run(checkpoint: Path, generation: Generation, *, stage: str | None = None) -> None:
    """Complete prompts, or chat, with a checkpoint.

    Without --prompt, every line of standard input is a prompt.

    Args:
        checkpoint: Folder of a checkpoint, of a run for its newest one, or of a recipe for its
            newest stage.
        generation: Prompts and settings.
        stage: Stage of that recipe.
    """
    generation.check()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
    import torch

    from titan_loop.inference.cache import cache_strategy
    from titan_loop.inference.engine import Engine
    from titan_loop.inference.exit_policy import parse_exit_policy
    from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer
    from titan_loop.inference.sampling import Sampling
    from titan_loop.inference.session import Session
    from titan_loop.inference.speculative import SelfSpeculation
    from titan_loop.runs.recipe_folder import chosen_run

    policy = parse_exit_policy(generation.exit)
    sampling = Sampling(
        temperature=generation.temperature, top_k=generation.top_k, top_p=generation.top_p
    )
    cache_strategy(generation.kv_cache)
    loaded = load_checkpoint(
        chosen_run(checkpoint, stage),
        use="generate",
        context_tokens=generation.context,
        device=compat.device_type(),
        dtype=getattr(torch, generation.dtype),
    )
    speculation = None
    if generation.draft_step is not None:
        speculation = SelfSpeculation(generation.draft_step, generation.draft_tokens)
    engine = Engine(
        loaded.model,
        recurrent_steps=generation.recurrent_steps or loaded.recurrent_steps,
        kv_cache=generation.kv_cache,
        exit_policy=policy,
        prefill_steps=generation.prefill_steps,
        speculation=speculation,
    )
    session = Session(
        engine,
        loaded,
        load_matching_tokenizer(loaded, generation.tokenizer),
        sampling=sampling,
        seed=generation.seed,
        max_new_tokens=generation.max_new_tokens,
        stop=generation.stop,
        chat=generation.chat,
    )
    if generation.chat and not session.knows_chats:
        print(
            "[this model was not trained on conversations: it continues the text of the chat]",
            file=sys.stderr,
        )
    if len(generation.prompt) > 1:
        _print(session, list(generation.prompt), show_steps=generation.show_steps)
    else:
        for prompt in generation.prompt or _lines():
            _print(session, [prompt], show_steps=generation.show_steps)


def _print(session: "Session", prompts: list[str], *, show_steps: bool) -> None:
    """Print a single answer token by token, or several completions one below the other."""
    from titan_loop.inference.rows import Completion

    start = time.perf_counter()
    alone = len(prompts) == 1
    completions = [Completion() for _ in prompts]
    shown = [""] * len(prompts)
    for event in session.answer(prompts[0]) if alone else session.complete(prompts):
        completions[event.row].add(event)
        text = event.text + (str(event.step).translate(_SUBSCRIPTS) if show_steps else "")
        shown[event.row] += text
        if alone:
            print(text, end="", flush=True)
    for prompt, text in zip(prompts, shown, strict=True):
        print("" if alone else f"=== {prompt}\n{text}", flush=True)
    tokens = sum(len(completion.steps) for completion in completions)
    seconds = time.perf_counter() - start
    phrases = [f"{tokens} tokens in {seconds:.1f} s", *session.summary(completions)]
    print(f"[{', '.join(phrases)}]", file=sys.stderr)
    if any(completion.finish == "context" for completion in completions):
        print(
            f"[ended at the context of {session.context_tokens} tokens, by default the trained "
            "window; --context gives it another]",
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
    """Return a text; raise `UserError` if it came from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"prompt {text!r:.60} is not UTF-8; convert it") from error
    return text
