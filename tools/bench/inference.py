"""Generation speed of a looped model: early exit, shared caches, self-speculation, plain decoding.

    python tools/bench/inference.py --size 374m --layers 12 --batches 1 8

Every ratio compares two ways of generating the same number of tokens in the same process, in turn:
its median and range over `--repeats`. Exit steps are drawn i.i.d. from (.4, .3, .2, .1), so the
result says what skipping is worth, not how well a gate decides. `--checkpoint` measures speculation
on a trained model; the acceptance of random weights means nothing. Refuses to run beside a load.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import titan_loop.compat  # noqa: F401  isort: skip  (before any torchtitan module)
import torch
import torch.nn.functional as F
from conditions import add_load_flag, machine, require_quiet_machine
from torch import Tensor
from torchtitan.tools import utils as titan_utils

from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import Evidence, ExitPolicy
from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer
from titan_loop.inference.request import Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.sizes import ModelOptions, build_decoder

RECURRENT_STEPS = 4
EXIT_PMF = (0.4, 0.3, 0.2, 0.1)
PARTS = ("exits", "caches", "plain", "speculation")


class DrawnExit(ExitPolicy):
    """Leaves after a step drawn from `EXIT_PMF`, independently for every token."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        survival = [sum(EXIT_PMF[step:]) for step in range(len(EXIT_PMF))]
        hazard = [p / s for p, s in zip(EXIT_PMF, survival, strict=True)]
        self._hazard = torch.tensor([0.0, *hazard])

    def fires(self, evidence: Evidence) -> Tensor:
        """Draw with the probability of leaving now, given that the token has come so far."""
        hazard = self._hazard[evidence.step_BL.cpu()]
        drawn = torch.rand(hazard.shape, generator=self._generator) < hazard
        return drawn.to(evidence.step_BL.device)


class PlainDecoder:
    """Decoding as a textbook has it: lock step, full depth, caches grown by concatenation."""

    def __init__(self, model: LoopDecoder) -> None:
        self.model = model
        self.slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, tokens_BL: Tensor, start: int) -> Tensor:
        """Run new tokens from position `start`; return the next token, (B, 1)."""
        model = self.model
        positions_BL = torch.arange(start, start + tokens_BL.shape[1], device=tokens_BL.device)
        rope_BLH = model.rope_table.rows(positions_BL.expand(tokens_BL.shape))
        x = model.tok_embeddings(tokens_BL)
        for step in range(RECURRENT_STEPS):
            for index, layer in enumerate(model.layers.values()):
                attention = layer.attention
                q, k, v = attention.qkv_linear(layer.attention_norm(x))
                q, k = attention.rope(q, k, rope_BLH=rope_BLH)
                if start:
                    past_k, past_v = self.slots[step, index]
                    k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
                self.slots[step, index] = (k, v)
                out = F.scaled_dot_product_attention(
                    *(t.transpose(1, 2) for t in (q, k, v)),
                    is_causal=not start,
                    enable_gqa=attention.enable_gqa,
                )
                out = attention.wo(out.transpose(1, 2).flatten(2))
                x = x + layer.attention_post_norm(out)
                x = x + layer.ffn_post_norm(layer.feed_forward(layer.ffn_norm(x)))
            x = model.norm(x)
        return model.lm_head(x[:, -1:]).argmax(-1)


def main() -> int:
    """Run every comparison and print its line."""
    options = _options()
    require_quiet_machine(options)
    device = titan_utils.get_local_device()
    print(" ".join(sys.argv), "|", machine(device))
    torch.manual_seed(0)
    size = ModelOptions(size=options.size, n_layers=options.layers, attention="sdpa")
    context = options.prompt_tokens + options.new_tokens
    model = build_decoder(size, max_seq_len=context, device=device).eval()
    for part in (model.tok_embeddings, model.layers, model.norm, model.lm_head):
        part.to(getattr(torch, options.dtype))  # gate and rotary table stay in fp32
    print(f"D {model.config.dim}, {len(model.layers)} layers, V {model.config.vocab_size}, R 4")
    for rows in options.batches if set(options.parts) - {"speculation"} else ():
        requests = _random_requests(model, rows, options)
        print(f"batch {rows}, prompts of {options.prompt_tokens}, {options.new_tokens} new tokens")
        if "exits" in options.parts:
            _compare_exits(model, requests, options.repeats)
        if "caches" in options.parts:
            _compare_caches(model, requests, options.repeats)
        if "plain" in options.parts:
            _compare_plain(model, requests, options.repeats, device)
    if "speculation" not in options.parts:
        return 0
    if options.checkpoint is None:
        print("self-speculation, batch 1, random weights")
        _compare_speculation(model, _random_requests(model, 1, options), options.repeats)
        return 0
    loaded = load_checkpoint(options.checkpoint, device=device)
    print(f"self-speculation, batch 1, {loaded.checkpoint}, after {options.prompt!r}")
    prompt = load_matching_tokenizer(loaded).encode(options.prompt).ids
    request = Request(prompt=prompt, max_new_tokens=options.new_tokens)
    _compare_speculation(loaded.model, [request], options.repeats)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="374m")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", type=Path, help="a trained model, for speculation")
    parser.add_argument("--prompt", default="def test_", help="of the trained model")
    add_load_flag(parser)
    return parser.parse_args()


def _random_requests(model: LoopDecoder, rows: int, options: argparse.Namespace) -> list[Request]:
    prompts = torch.randint(model.config.vocab_size, (rows, options.prompt_tokens)).tolist()
    return [Request(prompt=prompt, max_new_tokens=options.new_tokens) for prompt in prompts]


def _compare_exits(model: LoopDecoder, requests: list[Request], repeats: int) -> None:
    full = Engine(model, recurrent_steps=RECURRENT_STEPS)
    seeds = iter(range(10**6))

    def early() -> tuple[float, float]:
        policy = DrawnExit(next(seeds))
        return _timed(Engine(model, recurrent_steps=RECURRENT_STEPS, exit_policy=policy), requests)

    slow, fast = _alternate([lambda: _timed(full, requests), early], repeats)
    _print_ratio("early exit (.4 .3 .2 .1) over full depth", fast, slow)


def _compare_caches(model: LoopDecoder, requests: list[Request], repeats: int) -> None:
    names = ("full", "last", "first", "averaged")
    engines = [Engine(model, recurrent_steps=RECURRENT_STEPS, kv_cache=name) for name in names]
    times = _alternate(
        [lambda engine=engine: _timed(engine, requests) for engine in engines], repeats
    )
    whole = engines[0].work.cache_bytes
    for name, engine, seconds in zip(names, engines, times, strict=True):
        share = engine.work.cache_bytes / whole
        print(f"  cache {name:8} {engine.work.cache_bytes:>12,} bytes, {share:.3f} of full")
        if name != "full":
            _print_ratio(f"cache {name} over full", seconds, times[0])


def _compare_plain(
    model: LoopDecoder, requests: list[Request], repeats: int, device: torch.device
) -> None:
    engine = Engine(model, recurrent_steps=RECURRENT_STEPS)
    tokens = torch.tensor([list(request.prompt) for request in requests], device=device)
    count = requests[0].max_new_tokens

    @torch.no_grad()
    def plain() -> tuple[float, float]:
        decoder = PlainDecoder(model)
        start = _now(device)
        token = decoder.forward(tokens, 0)
        middle = _now(device)
        for offset in range(count - 1):
            token = decoder.forward(token, tokens.shape[1] + offset)
        return middle - start, _now(device) - middle

    theirs, ours = _alternate([plain, lambda: _timed(engine, requests)], repeats)
    prompt_tokens = tokens.numel()
    decoded = len(requests) * (count - 1)
    for name, times in (("plain", theirs), ("engine", ours)):
        prefill = statistics.median(t[0] for t in times)
        decode = statistics.median(t[1] for t in times)
        print(
            f"  {name:6} prefill {prompt_tokens / prefill:,.0f} tokens/s, "
            f"decode {decoded / decode:,.1f} tokens/s"
        )
    _print_ratio("engine over plain, decode", ours, theirs)
    _print_ratio("engine over plain, prefill", ours, theirs, part=0)


def _compare_speculation(model: LoopDecoder, requests: list[Request], repeats: int) -> None:
    plain = Engine(model, recurrent_steps=RECURRENT_STEPS)
    for draft_step in range(1, RECURRENT_STEPS):
        speculation = SelfSpeculation(draft_step, 3)
        engine = Engine(model, recurrent_steps=RECURRENT_STEPS, speculation=speculation)
        slow, fast = _alternate(
            [lambda: _timed(plain, requests), lambda engine=engine: _timed(engine, requests)],
            repeats,
        )
        name = f"draft step {draft_step}, 3 tokens, acceptance {speculation.acceptance:.2f}"
        _print_ratio(name, fast, slow)


def _timed(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """Return the seconds to the first token and from there to the end."""
    device = engine.stack.device
    start = _now(device)
    stream = engine.stream(requests)
    next(stream)
    middle = _now(device)
    for _ in stream:
        pass
    return middle - start, _now(device) - middle


def _alternate(
    runs: list[Callable[[], tuple[float, float]]], repeats: int
) -> list[list[tuple[float, float]]]:
    """Run all in turn, once to warm up and then `repeats` times."""
    for run in runs:
        run()
    rounds = [[run() for run in runs] for _ in range(repeats)]
    return [list(times) for times in zip(*rounds, strict=True)]


def _print_ratio(
    name: str,
    fast: list[tuple[float, float]],
    slow: list[tuple[float, float]],
    part: int = 1,
) -> None:
    ratios = [s[part] / f[part] for f, s in zip(fast, slow, strict=True)]
    print(
        f"  {name}: {statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})",
        flush=True,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    raise SystemExit(main())
