"""Bytes that a step keeps for its backward pass, by checkpointing policy, eager and compiled.

    python tools/bench/recomputation.py
    python tools/bench/recomputation.py --size 374m --seq-len 4096 --batch 4       # on a GPU

It counts the bytes alive between forward and backward pass, without parameters. Every visit of a
layer is compiled as a graph of its own, because a graph of several visits keeps activations that
the policy wants to recompute. The program fails if compiled layers keep more than 1.05 times the
bytes of eager ones.
"""

import sys
from dataclasses import replace

import torch
from conditions import begin
from timing import in_turn, ratios, spread
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from training_step import Job, batch, build, device, start, step_parser, trainer_step

from tests.support.allocations import AllocationTrace
from titan_loop.distributed.activation_checkpointing import RecurrentStepAC
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder

MOST = 1.05
POLICIES = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
    "recurrent-step": RecurrentStepAC.Config(),
    "recurrent-step, layers=full": RecurrentStepAC.Config(layers="full"),
}


def main() -> int:
    """Print a row per policy; 1 if compiled layers keep more than `MOST` allows."""
    parser = step_parser(__doc__, pairs=3)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    options = begin(parser, start=start)
    size = OuroOptions(size=options.size, recurrent_steps=options.recurrent_steps)
    eager = Job(model=size, seq_len=options.seq_len, windows=options.batch)
    print(
        "policy | kept eagerly, MiB | compiled | ratio | step eager, s | compiled | eager over it"
    )
    worst = 0.0
    for name, policy in POLICIES.items():
        jobs = [
            replace(eager, checkpointing=policy, compiled=compiled) for compiled in (False, True)
        ]
        models = [build(job) for job in jobs]
        steps = [trainer_step(job, model) for job, model in zip(jobs, models, strict=True)]
        first, second = in_turn(steps, pairs=options.pairs, warmup=options.warmup)
        kept = [_kept(job, model) for job, model in zip(jobs, models, strict=True)]
        worst = max(worst, kept[1] / kept[0])
        sizes = " | ".join(f"{each / 2**20:.1f}" for each in kept)
        times = f"{spread(first)} | {spread(second)} | {spread(ratios(first, second), 2)}"
        print(f"{name} | {sizes} | {kept[1] / kept[0]:.2f} | {times}")
    return int(worst > MOST)


def _kept(job: Job, model: LoopDecoder) -> int:
    """Return the bytes alive after a forward pass that were not before it."""
    tokens_BL, _ = batch(job)
    if device().type == "cuda":
        before = torch.cuda.memory_allocated()
        output = model(tokens_BL)
        kept = torch.cuda.memory_allocated() - before
        del output  # it held the graph until here
        return kept
    with AllocationTrace() as trace:
        hidden_RBLD = model(tokens_BL).hidden_RBLD
        trace.mark("kept")
    hidden_RBLD[-1].mean().backward()
    return trace.at("kept")


if __name__ == "__main__":
    sys.exit(main())
