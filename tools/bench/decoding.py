"""The cost of the decoded channel in a training step, beside its share of the step's FLOPs.

    python tools/bench/decoding.py

A plain loop, DiscoLoop with the whole vocabulary and DiscoLoop with the top k step in turn on the
same random tokens. FLOPs are those of `plan`: no recomputation, nothing for choosing the k tokens.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, spread
from training_step import Job, build, flops_per_step, start, step_parser, trainer_step

from titan_loop.families.discoloop.model import DiscoLoopOptions
from titan_loop.families.ouro.model import OuroOptions


def main() -> int:
    """Measure the three models and print the table."""
    parser = step_parser(__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    options = begin(parser, start=start)
    shared: dict[str, Any] = {
        "size": "quickstart",
        "dim": options.dim,
        "n_layers": options.layers,
        "hidden_dim": 3 * options.dim,
        "vocab_size": options.vocabulary,
        "recurrent_steps": options.recurrent_steps,
        "exit_gate": False,
        "tie_weights": True,
    }
    every = DiscoLoopOptions(**shared)
    models: dict[str, OuroOptions | DiscoLoopOptions] = {
        "plain loop": OuroOptions(**shared),
        "whole vocabulary": every,
        f"top {options.top_k}": replace(every, top_k=options.top_k),
    }
    jobs = {
        name: Job(model=model, seq_len=options.seq_len, windows=options.batch)
        for name, model in models.items()
    }
    steps = [trainer_step(job, build(job)) for job in jobs.values()]
    timed = in_turn(steps, pairs=options.pairs, warmup=options.warmup)
    plain = flops_per_step(jobs["plain loop"])
    print("model | step, s | over the plain loop (range) | FLOPs over the plain loop")
    for (name, job), seconds in zip(jobs.items(), timed, strict=True):
        over = spread(ratios(seconds, timed[0]), 2)
        flops = flops_per_step(job) / plain
        print(f"{name} | {statistics.median(seconds):.3f} | {over} | {flops:.2f}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
