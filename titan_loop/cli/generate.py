"""`titan-loop generate CHECKPOINT`: complete prompts or chat in the terminal, token by token."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    import argparse

    from tokenizers import Tokenizer

    from titan_loop.inference.engine import Engine
    from titan_loop.inference.rows import Completion, GeneratedToken

DTYPES = ("float32", "bfloat16", "float64")
_LARGEST_SEED = 2**64 - 1  # of torch.Generator
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def run(arguments: Sequence[str]) -> int:
    """Generate what is asked for, streaming to the terminal."""
    parser = _parser()
    given = parser.parse(arguments)
    _check(parser, given)

    import titan_loop.compat as compat  # isort: skip  (before any torchtitan module)
    import torch

    from titan_loop.inference.cache import cache_strategy
    from titan_loop.inference.engine import Engine
    from titan_loop.inference.exit_policy import parse_exit_policy
    from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
    from titan_loop.inference.rows import text_requests
    from titan_loop.inference.sampling import Sampling
    from titan_loop.inference.speculative import SelfSpeculation

    policy = parse_exit_policy(given.exit)
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    cache_strategy(given.kv_cache)
    loaded = load_checkpoint(
        given.checkpoint,
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

    def stream(prompts: list[str] | list[list[int]]) -> "Iterator[GeneratedToken]":
        requests = text_requests(
            tokenizer,
            prompts,
            stop_tokens=text_ends(loaded, tokenizer).stop_tokens,
            max_new_tokens=given.max_new_tokens,
            stop=given.stop,
        )
        return engine.stream(requests, sampling=sampling, generator=generator)

    session = _Session(engine, tokenizer, stream, given)
    if given.prompt and len(given.prompt) > 1:
        session.complete_all(given.prompt)
    else:
        for prompt in given.prompt or _lines():
            session.answer(prompt)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        "generate",
        "Complete prompts, or chat, with a checkpoint. Without --prompt every line of standard "
        "input is one.",
    )
    parser.add_argument("checkpoint", help="a checkpoint's folder, or a run's for its newest one")
    parser.add_argument("--prompt", action="append", help="repeat it for a batch")
    parser.add_argument("--chat", action="store_true", help="lines are turns of a ChatML chat")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, help="sample from the k most likely tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="and from their first share p")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is sampled")
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the text")
    parser.add_argument("--recurrent-steps", type=int, help="R; by default that of training")
    parser.add_argument(
        "--exit", default="full", help="full, static:S, hidden:EPSILON, q:THRESHOLD or kl:KL,NATS"
    )
    parser.add_argument("--kv-cache", default="full", help="full, last, first or averaged")
    parser.add_argument("--draft-step", type=int, help="draft at this step, verify at R")
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens drafted at a time")
    parser.add_argument("--show-steps", action="store_true", help="write each token's exit step")
    parser.add_argument("--tokenizer", help="a tokenizer.json; by default that of the source")
    parser.add_argument("--context", type=int, help="tokens; by default the trained window")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    return parser


def _check(parser: Parser, given: "argparse.Namespace") -> None:
    """Raise `UserError` for what cannot work or has no effect, before anything is loaded."""
    for name in ("max_new_tokens", "recurrent_steps"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    if not 0 <= given.seed <= _LARGEST_SEED:
        raise UserError(f"seed={given.seed} must be between 0 and {_LARGEST_SEED}")
    if given.chat and given.prompt and len(given.prompt) > 1:
        raise UserError("--chat takes one --prompt, or lines of standard input")
    without = [("draft_tokens", "--draft-step")] if given.draft_step is None else []
    if given.temperature == 0:
        without += [("top_k", "a --temperature above 0"), ("top_p", "a --temperature above 0")]
    for name, needed in without:
        value = getattr(given, name)
        if value != parser.get_default(name):
            raise UserError(f"{name}={value} has no effect without {needed}")


class _Session:
    """Prints completions and, in a chat, remembers what was said."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: "Tokenizer",
        stream: "Callable[[list[str] | list[list[int]]], Iterator[GeneratedToken]]",
        given: "argparse.Namespace",
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


def _lines() -> Iterator[str]:
    """Yield the lines of standard input, with a mark to type behind at a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
