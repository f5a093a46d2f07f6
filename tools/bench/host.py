"""The host's part of a training step: time, operator calls, products and copies, beside plain's.

    python tools/bench/host.py                  # all rows; `--counts` leaves the times out

A narrow, deep model on one window of few tokens, where nothing but the host's work takes time. The
plain model is the one of `plain.py`: its row is 1 and the others are over it. `bf16` casts weights
once a step, as on one GPU. Calls are those that the profiler sees, one inside another counted, too;
they depend on no machine's speed. On a CPU times are processor time of its one thread.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import timing
import torch
import torch.distributed as dist
from conditions import begin
from plain import PlainLoop
from timing import in_turn, ratios, spread
from torch.profiler import ProfilerActivity, profile
from training_step import (
    Job,
    batch,
    build,
    device,
    optimizer_step,
    start,
    step_parser,
    trainer_step,
)

from titan_loop.families.ouro.model import OuroOptions

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::clone")


class Calls(NamedTuple):
    """Operator calls of one step: all of them, matrix products, and copies."""

    all: int
    products: int
    copies: int


def count_calls(step: Callable[[], object]) -> Calls:
    """Return the calls of one step, which should have run before."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    calls = {event.key: event.count for event in seen.key_averages() if "::" in event.key}
    named = [sum(calls.get(name, 0) for name in names) for names in (PRODUCTS, COPIES)]
    return Calls(sum(calls.values()), *named)


def steps_of(options: argparse.Namespace) -> Mapping[str, Callable[[], object]]:
    """Return the steps to compare, by name; plain's comes first."""
    heads = options.dim // 32
    model = OuroOptions(
        dim=options.dim, n_layers=options.layers, n_heads=heads, hidden_dim=3 * options.dim
    )
    model = replace(model, vocab_size=256, recurrent_steps=options.recurrent_steps)
    job = Job(model=model, seq_len=options.tokens, windows=1)
    low = replace(job, compute_dtype="bfloat16")
    tokens, labels = batch(job)
    source = build(job)
    steps: dict[str, Callable[[], object]] = {}
    for name, compiled in (("", False), (", compiled", True))[: 1 if options.no_compile else 2]:
        plain = PlainLoop(source, heads, options.tokens)
        if compiled:
            for layer in plain.layers:
                layer.compile()
        steps[f"plain{name}"] = optimizer_step(plain, lambda plain=plain: plain(tokens, labels))
        for kind, each in (("fp32", job), ("bf16", low)):
            chosen = replace(each, compiled=compiled)
            steps[f"{kind}{name}"] = trainer_step(chosen, build(chosen))
    return steps


def main() -> None:
    """Print the table."""
    parser = step_parser(__doc__)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true", help="leave compiled steps out")
    parser.add_argument("--counts", action="store_true", help="count calls and time nothing")
    options = begin(parser, start=start)
    torch.set_num_threads(1)
    if device().type == "cpu":
        timing.clock = time.process_time
    steps = steps_of(options)
    for step in steps.values():
        for _ in range(2):  # the first makes the optimiser's state and compiles
            step()
    calls = {name: count_calls(step) for name, step in steps.items()}
    times = [[1.0] for _ in steps]
    if not options.counts:
        times = in_turn(list(steps.values()), pairs=options.pairs, warmup=options.warmup)
    print("step | calls | over plain's | products | copies | s | over plain's")
    plain, seconds = calls["plain"], times[0]
    for (name, each), own in zip(calls.items(), times, strict=True):
        row = f"{name} | {each.all:,} | {each.all / plain.all:.2f} | {each.products:,}"
        timed = "" if options.counts else f" | {spread(own)} | {spread(ratios(own, seconds), 2)}"
        print(f"{row} | {each.copies:,}{timed}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
