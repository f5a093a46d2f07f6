"""`titan-loop generate CHECKPOINT`: complete prompts or chat in the terminal, token by token."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError, require_at_least

if TYPE_CHECKING:
    from titan_loop.inference.rows import Completion, GeneratedToken
    from titan_loop.text.conversation import Turn

_LARGEST_SEED = 2**64 - 1  # of torch.Generator
_DRAFT_TOKENS = 3  # before each verification
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts and settings of the generation.

    Attributes:
        prompt: Text to complete; repeat the flag for a batch. An empty one starts a new document.
        chat: Treat prompts as the user's turns of a chat, in the template of the training data or
            of the imported model; ChatML for a model without one.
        max_new_tokens: Maximum number of tokens per completion.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the most likely tokens, as many as reach the probability p together.
        seed: Seed of the sampling.
        stop: String at which a completion ends; may be repeated.
        recurrent_steps: Number of recurrent steps R; by default the trained one.
        exit: Exit policy, such as full, static:2, q:0.9 or kl:0.01,3; the README of
            titan_loop/inference lists them.
        kv_cache: Key-value cache: full, last, first, averaged, or
            the family's own.
        prefill_steps: Number of recurrent steps of prompts; by default as for generated tokens.
        draft_step: Decode speculatively: draft three tokens at this recurrent step, verify at R.
        show_steps: Print each token's exit step as its subscript.
        tokenizer: A tokenizer.json; by default the tokenizer of the run's data.
        context: Maximum tokens of prompt and completion; by default the trained window.
        dtype: Type of the weights.
        compile: Compile the visits of generated tokens, on a CPU. The first tokens wait for it, up
            to a minute; later starts find the code. It pays for long answers of small models.
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
    show_steps: bool = False
    tokenizer: str | None = None
    context: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    compile: bool = False

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
        if self.temperature == 0 and (self.top_k is not None or self.top_p != 1.0):
            raise UserError("top_k and top_p have no effect without a --temperature above 0")


@command("generate")
def run(checkpoint: Path, generation: Generation, *, stage: str | None = None) -> None:
    """Complete prompts, or chat, with a checkpoint.

    Without --prompt, every line of standard input is a prompt.

    Args:
        checkpoint: A checkpoint, a run (its newest checkpoint is taken) or a recipe's folder (its
            newest stage is taken).
        generation: Prompts and settings.
        stage: Stage to take instead, if a recipe's folder is given.
    """
    generation.check()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from titan_loop.runs.recipe_folder import chosen_run

    session = _Session(chosen_run(checkpoint, stage), generation)
    if len(generation.prompt) > 1:
        session.print_answers(list(generation.prompt))
    else:
        for prompt in generation.prompt or _lines():
            session.print_answers([prompt])


class _Session:
    """A conversation with a model, or one completion after another."""

    def __init__(self, checkpoint: Path, generation: Generation) -> None:
        import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
        import torch

        from titan_loop.inference.cache import cache_strategy
        from titan_loop.inference.engine import Engine
        from titan_loop.inference.exit_policy import parse_exit_policy
        from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
        from titan_loop.inference.sampling import Sampling
        from titan_loop.inference.speculative import SelfSpeculation
        from titan_loop.text.chat_encoding import ChatEncoder

        self.generation = generation
        policy = parse_exit_policy(generation.exit)
        self.sampling = Sampling(
            temperature=generation.temperature, top_k=generation.top_k, top_p=generation.top_p
        )
        cache_strategy(generation.kv_cache)  # refuses a wrong one before a checkpoint is read
        loaded = load_checkpoint(
            checkpoint,
            use="generate",
            context_tokens=generation.context,
            device=compat.device_type(),
            dtype=getattr(torch, generation.dtype),
        )
        draft = generation.draft_step
        self.engine = Engine(
            loaded.model,
            recurrent_steps=generation.recurrent_steps or loaded.recurrent_steps,
            kv_cache=generation.kv_cache,
            exit_policy=policy,
            prefill_steps=generation.prefill_steps,
            speculation=None if draft is None else SelfSpeculation(draft, _DRAFT_TOKENS),
            compile=generation.compile,
        )
        self.tokenizer = load_matching_tokenizer(loaded, generation.tokenizer)
        self.generator = torch.Generator().manual_seed(generation.seed)
        self.ends = text_ends(loaded, self.tokenizer)
        self.encoder: ChatEncoder | None = None
        self.turns: list[Turn] = []
        if generation.chat:
            text = loaded.run.text_format(self.tokenizer)
            self.encoder = ChatEncoder(self.tokenizer, text.template)
            if not text.knows_chats:
                self._note(
                    "this model was not trained on conversations: it continues the text of the chat"
                )

    def print_answers(self, prompts: list[str]) -> None:
        """Print a single answer token by token, or several completions one below the other."""
        from titan_loop.inference.exit_policy import StaticStep
        from titan_loop.inference.rows import Completion

        if any(prompt.endswith(" ") for prompt in prompts) and not self.generation.chat:
            self._note("a prompt ends in a space, which tokenizers join to the word that follows")
        start = time.perf_counter()
        alone = len(prompts) == 1
        completions = [Completion() for _ in prompts]
        shown = [""] * len(prompts)
        shows = self.generation.show_steps and not isinstance(self.engine.exit_policy, StaticStep)
        if self.generation.show_steps and not shows:
            steps = self.engine.recurrent_steps
            self._note(f"every token leaves after step {steps}; choose with --exit confidence:0.9")
        for event in self._answer(prompts[0]) if alone else self._complete(prompts):
            completions[event.row].add(event)
            step = str(event.step).translate(_SUBSCRIPTS) if shows else ""
            shown[event.row] += event.text + step
            if alone:
                print(event.text + step, end="", flush=True)
        for prompt, text in zip(prompts, shown, strict=True):
            print("" if alone else f"=== {prompt}\n{text}", flush=True)
        print(f"[{self._cost(completions, time.perf_counter() - start)}]", file=sys.stderr)
        if any(completion.finish == "context" for completion in completions):
            self._note(
                f"ended at the context of {self.engine.stack.context_tokens} tokens, by default "
                "the trained window; --context sets another"
            )

    def _note(self, text: str) -> None:
        print(f"[{text}]", file=sys.stderr)

    def _answer(self, prompt: str) -> Iterator["GeneratedToken"]:
        from titan_loop.inference.rows import Completion
        from titan_loop.text.conversation import ASSISTANT, USER, Conversation, Turn

        if self.encoder is None:
            yield from self._complete([prompt])
            return
        self.turns.append(Turn(USER, prompt))
        ids, question_tokens = self.encoder.prompt(Conversation(tuple(self.turns)))
        context, turns = self.engine.stack.context_tokens, len(self.turns)
        room = min(self.generation.max_new_tokens, context // 4)
        while len(ids) > context - room and len(self.turns) > 1:
            del self.turns[:2]  # the oldest question and its answer
            ids, question_tokens = self.encoder.prompt(Conversation(tuple(self.turns)))
        if left_out := turns - len(self.turns):
            self._note(f"the oldest {left_out} turns were left out: they no longer fit the context")
        completion = Completion()
        for event in self._complete([ids], prefixes=[question_tokens]):
            completion.add(event)
            yield event
        self.turns.append(Turn(ASSISTANT, completion.text))

    def _complete(
        self, prompts: Sequence[str | list[int]], prefixes: Sequence[int] | None = None
    ) -> Iterator["GeneratedToken"]:
        """Stream the completions of several prompts, side by side; an empty one begins a text."""
        from titan_loop.inference.rows import text_requests

        # Documents that begin with no token of their own begin after the last one's end.
        before = [] if self.ends.end_of_text is None else [self.ends.end_of_text]
        begin = self.ends.begin_of_text
        beginning = before if begin is None else [begin]
        requests = text_requests(
            self.tokenizer,
            [prompt or beginning for prompt in prompts],
            stop_tokens=self.ends.stop_tokens,
            max_new_tokens=self.generation.max_new_tokens,
            stop=self.generation.stop,
            prefixes=prefixes,
            begin=begin,
        )
        return self.engine.stream(requests, sampling=self.sampling, generator=self.generator)

    def _cost(self, completions: Sequence["Completion"], seconds: float) -> str:
        engine = self.engine
        steps = [step for completion in completions for step in completion.steps]
        mean = sum(steps) / len(steps) if steps else float("nan")
        cost = (
            f"{len(steps)} tokens in {seconds:.1f} s, "
            f"mean exit step {mean:.2f} of {engine.recurrent_steps}, "
            f"cache {engine.work.cache_bytes / 1e6:.2f} MB ({engine.kv_cache})"
        )
        if engine.speculation is not None:
            cost += f", accepted {engine.speculation.acceptance:.0%} of the drafts"
        return cost


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield _require_text(line.rstrip("\n"))


def _require_text(text: str) -> str:
    """Return a prompt or a stop string; raise `UserError` if its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"text {text!r:.60} is not UTF-8; convert it") from error
    return text
