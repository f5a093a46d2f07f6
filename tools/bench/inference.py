"""Speed of inference: early exit, shared caches, plain decoding, and the depth sweep of evaluation.

    python tools/bench/inference.py                      # every aim; minutes on two cores
    python tools/bench/inference.py --parts speculation --checkpoint runs/NAME

Every ratio compares two ways of doing the same work in the same process, in turn: its median and
range over `--repeats`. Exit steps are drawn i.i.d. from (.4, .3, .2, .1), so the result says what
skipping is worth, not how well a gate decides. The sweep scores depths 1 … 8 in one pass, and in
eight: Σ_R (R c + k) = 36 c + 8 k against 8 c + 8 k, c one loop and k one readout, both measured in
the same rounds. Ends with code 1 if an aim is missed; refuses to run beside a load.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import titan_loop.compat  # noqa: F401  isort: skip  (before any torchtitan module)
import timing
import torch
import torch.nn.functional as F
from conditions import begin, parser_of
from timing import in_turn, now, ratios, results_in_turn, spread
from torch import Tensor

from titan_loop.evaluation.readings import depth_readings, score_states
from titan_loop.evaluation.share_work import rank_device
from titan_loop.evaluation.token_scorer import TokenRequest, TokenScorer
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.cache import STRATEGIES
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import Evidence, ExitPolicy
from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer
from titan_loop.inference.rows import Request
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.attention import LoopAttention
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

RECURRENT_STEPS = 4
EXIT_PMF = (0.4, 0.3, 0.2, 0.1)
PARTS = ("exits", "caches", "plain", "sweep")
EARLY_EXIT_AIM = {1: 1.5, 8: 1.4}
"""Least speed-up over full depth, by batch, at D ≥ 1024."""
LEAST_DIM_OF_AIMS = 1024
SWEEP_DEPTHS = range(1, 9)
SWEEP_SHARE = 0.9
"""Of what loops and readouts alone predict for the sweep."""


class DrawnExit(ExitPolicy):
    """Leaves after a step drawn from `EXIT_PMF`, independently for every token."""

    name = "static"

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
        rope_BLH = model.positions.shared(positions_BL.expand(tokens_BL.shape), positions_BL)
        x = model.tok_embeddings(tokens_BL)
        for step in range(RECURRENT_STEPS):
            layers: list[Any] = [*model.layers.values()]  # Ouro's, which have every norm
            for index, layer in enumerate(layers):
                attention = layer.attention
                assert isinstance(attention, LoopAttention)
                q, k, v = attention.qkv_linear(layer.attention_norm(x))
                q, k = attention.rope(q, k, rope_BLH=rope_BLH)
                if start:
                    past_k, past_v = self.slots[step, index]
                    k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
                self.slots[step, index] = (k, v)
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=not start, enable_gqa=attention.enable_gqa
                )
                out = attention.wo(out.transpose(1, 2).flatten(2))
                x = x + layer.attention_post_norm(out)
                x = x + layer.ffn_post_norm(layer.feed_forward(layer.ffn_norm(x)))
            x = model.norm(x)
        return model.lm_head(x[:, -1:]).argmax(-1)


def main() -> int:
    """Run every comparison, print its line, and return 1 if one misses its aim."""
    options = _options()
    device = rank_device()
    if "speculation" in options.parts:
        _compare_speculation(options, device)
    if set(options.parts) == {"speculation"}:
        return 0
    torch.manual_seed(0)
    size = OuroOptions(size=options.size, n_layers=options.layers, attention="sdpa")
    context = max(options.prompt_tokens + options.new_tokens, options.sweep_tokens)
    model = build_decoder(size, max_seq_len=context, device=device).eval()
    for part in (model.tok_embeddings, model.layers, model.norm, model.lm_head):
        part.to(getattr(torch, options.dtype))  # gate and rotary table stay in fp32
    print(f"D {model.config.dim}, {len(model.layers)} layers, V {model.config.vocab_size}, R 4")
    met = [_compare_generation(model, rows, options) for rows in options.batches]
    if "sweep" in options.parts:
        met.append(_compare_sweep(model, options))
    return 0 if all(met) else 1


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="374m")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--sweep-windows", type=int, default=1)
    parser.add_argument("--sweep-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "speculation"), default=PARTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", type=Path, help="a trained model, for speculation")
    parser.add_argument("--prompt", default="def test_", help="of the trained model")
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="count CPU seconds of one thread, which other programs change less than the time",
    )
    options = begin(parser)
    if options.cpu_seconds:
        if torch.get_num_threads() > 1:
            parser.error("--cpu-seconds counts all threads: set OMP_NUM_THREADS=1")
        timing.clock = time.process_time
    if "speculation" in options.parts and options.checkpoint is None:
        parser.error("--parts speculation needs --checkpoint: random weights accept no draft")
    return options


def _compare_generation(model: LoopDecoder, rows: int, options: argparse.Namespace) -> bool:
    """Generate in every way that the options ask for, in turn; return whether all aims are met."""
    prompts = torch.randint(model.config.vocab_size, (rows, options.prompt_tokens)).tolist()
    requests = [Request(prompt=prompt, max_new_tokens=options.new_tokens) for prompt in prompts]
    runs: dict[str, Callable[[], Times]] = {}
    full = Engine(model, recurrent_steps=RECURRENT_STEPS)
    if set(options.parts) & {"exits", "caches", "plain"}:
        print(f"batch {rows}, prompts of {options.prompt_tokens}, {options.new_tokens} new tokens")
        runs["full"] = lambda: _timed(full, requests)
    if "exits" in options.parts:
        policies = map(DrawnExit, itertools.count())
        runs["early"] = lambda: _timed(
            Engine(model, recurrent_steps=RECURRENT_STEPS, exit_policy=next(policies)), requests
        )
    if "caches" in options.parts:
        last = Engine(model, recurrent_steps=RECURRENT_STEPS, kv_cache="last")
        runs["last"] = lambda: _timed(last, requests)
    if "plain" in options.parts:
        tokens = torch.tensor(prompts, device=full.stack.device)
        runs["plain"] = lambda: _timed_plain(model, tokens, options.new_tokens)
    times = dict(zip(runs, results_in_turn([*runs.values()], pairs=options.repeats), strict=True))
    prefill = {name: [time.prefill for time in taken] for name, taken in times.items()}
    decode = {name: [time.decode for time in taken] for name, taken in times.items()}
    met = True
    if "early" in times:
        aim = EARLY_EXIT_AIM.get(rows) if model.config.dim >= LEAST_DIM_OF_AIMS else None
        name = "early exit (.4 .3 .2 .1) over full depth, decode"
        met &= _print_ratio(name, decode["early"], decode["full"], aim=aim)
    if "last" in times:
        met &= _print_cache_bytes(model, rows, options)
        _print_ratio("cache last over full, decode", decode["last"], decode["full"])
    if "plain" in times:
        for name in ("plain", "full"):
            read = rows * options.prompt_tokens / statistics.median(prefill[name])
            written = rows * (options.new_tokens - 1) / statistics.median(decode[name])
            print(
                f"  {'engine' if name == 'full' else name:6} prefill {read:,.0f} tokens/s, "
                f"decode {written:,.1f} tokens/s"
            )
        _print_ratio("engine over plain, decode", decode["full"], decode["plain"])
        _print_ratio("engine over plain, prefill", prefill["full"], prefill["plain"])
    return met


def _print_cache_bytes(model: LoopDecoder, rows: int, options: argparse.Namespace) -> bool:
    """Print what every strategy allocates; return whether `last` takes 1/R of `full`."""
    stack = Engine(model).stack
    sizes: dict[str, int] = {}
    for name, strategy in STRATEGIES.items():
        cache = stack.make_cache(
            strategy,
            steps=RECURRENT_STEPS,
            rows=rows,
            capacity=options.prompt_tokens + options.new_tokens,
        )
        sizes[name] = cache.allocated_bytes
        share = sizes[name] / sizes["full"]
        print(f"  cache {name:8} {sizes[name]:>12,} bytes, {share:.3f} of full", end="")
        print("" if name != "last" else f"; aim {1 / RECURRENT_STEPS}")
    return sizes["last"] * RECURRENT_STEPS == sizes["full"]


@torch.no_grad()
def _compare_sweep(model: LoopDecoder, options: argparse.Namespace) -> bool:
    """Score windows at depths 1 … 8 in one pass and in eight; return whether the aim is met."""
    windows, length = options.sweep_windows, options.sweep_tokens
    device = model.tok_embeddings.weight.device
    tokens = torch.randint(model.config.vocab_size, (windows, length + 1), device=device)
    requests = [TokenRequest((row[0],), tuple(row[1:])) for row in tokens.tolist()]
    together = TokenScorer(model, depth_readings(SWEEP_DEPTHS), batch_rows=windows)
    apart = [
        TokenScorer(model, depth_readings([depth]), batch_rows=windows) for depth in SWEEP_DEPTHS
    ]
    context = model.make_context(tokens[:, :-1])
    state_BLD = model.step(model.tok_embeddings(tokens[:, :-1]), 1, context)
    labels_T, read = tokens[:, 1:].flatten(), depth_readings([1])

    def one_pass() -> None:
        together.score(requests)

    def eight_passes() -> None:
        for scorer in apart:
            scorer.score(requests)

    def loop() -> None:
        model.step(state_BLD, 2, context)

    def readout() -> None:
        score_states(model, [state_BLD.flatten(0, 1)], labels_T, read)

    works = [one_pass, eight_passes, loop, readout]
    sweep, separate, c, k = in_turn(works, pairs=options.repeats, warmup=1)
    c_s, k_s = statistics.median(c), statistics.median(k)
    predicted = (36 * c_s + 8 * k_s) / (8 * c_s + 8 * k_s)
    print(
        f"depth sweep, R = 1 … 8 over {windows} windows of {length} tokens: one loop {c_s:.3f} s, "
        f"one readout {k_s:.3f} s, predicted {predicted:.2f}x"
    )
    aim = SWEEP_SHARE * predicted if model.config.dim >= LEAST_DIM_OF_AIMS else None
    return _print_ratio("one pass over eight", sweep, separate, aim=aim)


def _compare_speculation(options: argparse.Namespace, device: torch.device) -> None:
    loaded = load_checkpoint(options.checkpoint, device=device)
    print(f"self-speculation, batch 1, {loaded.checkpoint}, after {options.prompt!r}")
    prompt = load_matching_tokenizer(loaded).encode(options.prompt).ids
    requests = [Request(prompt=prompt, max_new_tokens=options.new_tokens)]
    plain = Engine(loaded.model, recurrent_steps=RECURRENT_STEPS)
    for draft_step in range(1, RECURRENT_STEPS):
        speculation = SelfSpeculation(draft_step, 3)
        engine = Engine(loaded.model, recurrent_steps=RECURRENT_STEPS, speculation=speculation)
        slow, fast = results_in_turn(
            [lambda: _timed(plain, requests), lambda engine=engine: _timed(engine, requests)],
            pairs=options.repeats,
        )
        name = f"draft step {draft_step}, 3 tokens, acceptance {speculation.acceptance:.2f}"
        _print_ratio(name, [time.decode for time in fast], [time.decode for time in slow])


class Times(NamedTuple):
    """Seconds to the first token, and from there to the end."""

    prefill: float
    decode: float


def _timed(engine: Engine, requests: list[Request]) -> Times:
    start = now()
    stream = engine.stream(requests)
    next(stream)
    middle = now()
    for _ in stream:
        pass
    return Times(middle - start, now() - middle)


@torch.no_grad()
def _timed_plain(model: LoopDecoder, tokens: Tensor, count: int) -> Times:
    decoder = PlainDecoder(model)
    start = now()
    token = decoder.forward(tokens, 0)
    middle = now()
    for offset in range(count - 1):
        token = decoder.forward(token, tokens.shape[1] + offset)
    return Times(middle - start, now() - middle)


def _print_ratio(
    name: str,
    fast: list[float],
    slow: list[float],
    *,
    aim: float | None = None,
) -> bool:
    """Print the median ratio with its range, and the aim; return whether it is met."""
    faster = ratios(slow, fast)
    median = statistics.median(faster)
    said = "" if aim is None else f"; aim {aim:.2f}x{'' if median >= aim else ', MISSED'}"
    print(f"  {name}: {spread(faster, 2)}x{said}", flush=True)
    return aim is None or median >= aim


if __name__ == "__main__":
    raise SystemExit(main())
