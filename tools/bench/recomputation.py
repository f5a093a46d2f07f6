"""Bytes that a step keeps for its backward pass and FLOPs that it runs again, by policy.

    python tools/bench/recomputation.py
    python tools/bench/recomputation.py --size 374m --seq-len 4096 --batch 4       # on a GPU

It counts the bytes alive between forward and backward pass, without parameters, eager and compiled,
and the FLOPs of matrix products and attention that the eager backward pass adds to those without
checkpointing, as a share of the layers' forward pass. Every visit of a layer is compiled as a graph
of its own, because a graph of several visits keeps activations that the policy wants to recompute.
The program fails if compiled layers keep more than 1.05 times the bytes of eager ones.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from conditions import begin
from timing import in_turn, ratios, spread
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
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
    parser.add_argument("--no-compile", action="store_true", help="measure eager layers alone")
    options = begin(parser, start=start)
    size = OuroOptions(size=options.size, recurrent_steps=options.recurrent_steps)
    eager = Job(model=size, seq_len=options.seq_len, windows=options.batch)
    forms = (False,) if options.no_compile else (False, True)
    print(
        "policy | run again, % | kept eagerly, MiB | step, s | kept compiled | ratio | step | "
        "eager over it"
    )
    worst = 0.0
    _, backward_alone = _flops(eager, build(eager))
    for name, policy in POLICIES.items():
        jobs = [replace(eager, checkpointing=policy, compiled=form) for form in forms]
        models = [build(job) for job in jobs]
        steps = [trainer_step(job, model) for job, model in zip(jobs, models, strict=True)]
        seconds = in_turn(steps, pairs=options.pairs, warmup=options.warmup)
        forward, backward = _flops(jobs[0], models[0])
        kept = [_kept(job, model) for job, model in zip(jobs, models, strict=True)]
        worst = max(worst, kept[-1] / kept[0])
        columns = [name, f"{(backward - backward_alone) / forward:.0%}"]
        for size_bytes, times in zip(kept, seconds, strict=True):
            columns += [f"{size_bytes / 2**20:.1f}", spread(times)]
        if not options.no_compile:
            columns.insert(-1, f"{kept[1] / kept[0]:.2f}")
            columns.append(spread(ratios(*seconds), 2))
        print(" | ".join(columns), flush=True)
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


def _flops(job: Job, model: LoopDecoder) -> tuple[int, int]:
    """Return the FLOPs of the layers' forward and backward pass, eager."""
    tokens_BL, _ = batch(job)

    def counted(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: counted}
    with FlopCounterMode(display=False, custom_mapping=attention) as forward:
        state_BLD = model(tokens_BL).hidden_RBLD[-1]
    with FlopCounterMode(display=False, custom_mapping=attention) as backward:
        state_BLD.mean().backward()
    return forward.get_total_flops(), backward.get_total_flops()


if __name__ == "__main__":
    sys.exit(main())
