"""Does a loop cost what its FLOPs say: 4 × 6 looped layers against 24 layers, in one trainer.

    python tools/bench/looped_or_deep.py
    python tools/bench/looped_or_deep.py --dim 1024 --heads 16 --hidden-dim 2816 --seq-len 4096 \
        --batch 4                                                               # a GPU

First both read one state out (no gate), so that their FLOPs are equal. Then the loop reads out all
its states; the extra time is compared with that of the head and loss alone on as many states more.
`titan-loop plan` says what either communicates.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, spread
from training_step import (
    Job,
    batch,
    build,
    device,
    flops_per_step,
    start,
    step_parser,
    trainer_step,
)

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder


def main() -> int:
    """Print the table."""
    parser = step_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden-dim", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    options = begin(parser, start=start)
    looped = _job(options, options.layers, options.recurrent_steps, exit_gate=False)
    deep = _job(options, options.layers * options.recurrent_steps, 1, exit_gate=False)
    gated = _job(options, options.layers, options.recurrent_steps, exit_gate=True)
    models = [build(job) for job in (looped, deep, gated)]
    steps = [
        trainer_step(job, model) for job, model in zip((looped, deep, gated), models, strict=True)
    ]
    readout = _readouts(gated, models[2], options.recurrent_steps - 1)
    times = in_turn([*steps, readout], pairs=options.pairs, warmup=options.warmup)
    names = (
        f"{options.recurrent_steps} × {options.layers} layers, one readout",
        f"{options.layers * options.recurrent_steps} layers, one readout",
        f"{options.recurrent_steps} × {options.layers} layers, {options.recurrent_steps} readouts",
        f"{options.recurrent_steps - 1} readouts alone",
    )
    print("what | step s")
    for name, seconds in zip(names, times, strict=True):
        print(f"{name} | {spread(seconds)}")
    flops = flops_per_step(looped) / flops_per_step(deep)
    print(f"looped over deep: time {spread(ratios(times[0], times[1]))}, FLOPs {flops:.3f}")
    extra = [gate - one for gate, one in zip(times[2], times[0], strict=True)]
    share = statistics.median(extra) / statistics.median(times[3])
    print(f"extra readouts: {spread(extra)} s in the step, {share:.2f} of the readouts alone")
    dist.destroy_process_group()
    return 0


def _job(options: argparse.Namespace, layers: int, steps: int, *, exit_gate: bool) -> Job:
    return Job(
        model=OuroOptions(
            dim=options.dim,
            n_layers=layers,
            n_heads=options.heads,
            hidden_dim=options.hidden_dim,
            vocab_size=options.vocab_size,
            recurrent_steps=steps,
            exit_gate=exit_gate,
        ),
        seq_len=options.seq_len,
        windows=options.batch,
        compiled=options.compile,
    )


def _readouts(job: Job, model: LoopDecoder, count: int) -> Callable[[], None]:
    """Return a function that computes loss and gradients of `count` states, without layers."""
    _, labels = batch(job)
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    shape = (job.windows, job.seq_len, model.config.dim)
    states = tuple(
        torch.randn(shape, device=device(), dtype=dtype).requires_grad_() for _ in range(count)
    )
    weight = torch.full((count, job.windows, job.seq_len), 1 / labels.numel(), device=device())

    def readouts() -> None:
        loss, _ = model.lm_head(states, labels_BL=labels, weight_RBL=weight)
        loss.backward()
        model.lm_head.weight.grad = None

    return readouts


if __name__ == "__main__":
    raise SystemExit(main())
