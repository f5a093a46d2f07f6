"""Does a loop cost what its FLOPs say: 4 × 6 looped layers against 24 layers, in one trainer.

    python tools/bench/looped_or_deep.py
    python tools/bench/looped_or_deep.py --dim 1024 --heads 16 --hidden-dim 2816 --seq-len 4096 \
        --batch 4                                                               # a GPU

First both read one state out (no gate), so that their FLOPs are equal. Then the loop reads out all
its states; the extra time is compared with that of the head and loss alone on as many states more.
Bytes are those `communication.py` predicts for a training step on two ranks under `per_step`; a
test compares its predictions with what is counted.
"""

import argparse
import dataclasses
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

from titan_loop.distributed.communication import step_traffic
from titan_loop.distributed.step_shape import StepShape
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import decoder_config


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
    for what in ("layers", "all"):
        received = [_received(job, what) for job in (looped, deep)]
        print(
            f"bytes received in a step on two ranks, {what}: {received[0]:,.0f} of "
            f"{received[1]:,.0f}, {received[0] / received[1]:.4f}"
        )
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
    shape = (job.windows, job.seq_len, job.model.dim)
    states = tuple(
        torch.randn(shape, device=device(), dtype=dtype).requires_grad_() for _ in range(count)
    )
    weight = torch.full((count, job.windows, job.seq_len), 1 / labels.numel(), device=device())

    def readouts() -> None:
        loss, _ = model.lm_head(states, labels_BL=labels, weight_RBL=weight)
        loss.backward()
        model.lm_head.weight.grad = None

    return readouts


def _received(job: Job, what: str) -> float:
    config = decoder_config(
        dataclasses.replace(job.model, attention="sdpa"), max_seq_len=job.seq_len
    )
    shape = StepShape(
        windows=job.windows,
        seq_len=job.seq_len,
        recurrent_steps=config.recurrent_steps,
        compute_bytes=2 if device().type == "cuda" else 4,
        shard_degree=2,
    )
    traffic = step_traffic(config, shape, hold_layers=True)
    return sum(entry.received_bytes for entry in traffic if what in ("all", entry.what))


if __name__ == "__main__":
    raise SystemExit(main())
