"""The cost of a gate-only training step beside a step that trains the whole model.

    python tools/bench/gate_stage.py --size quickstart --recurrent-steps 4

Both step in turn on the same random tokens, so both see the same machine; the ratio is the median
over the pairs and its range. Refuses to run beside another load, and exits with 1 if the ratio is
above `--limit`. Runs unchanged on a GPU, where parameters are bf16 under FSDP.
"""

import argparse
import dataclasses
import statistics

import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, spread
from training_step import Job, build, start, step_parser, trainer_step

from titan_loop.families.ouro.model import OuroOptions


def main() -> int:
    """Measure every R asked for and print the table."""
    parser = step_parser(__doc__, pairs=9)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--limit", type=float, default=0.45)
    options = begin(parser, start=start)
    print(" R | whole model, s | gate only, s | ratio (range)")
    worst = max(_measure(options, steps) for steps in options.recurrent_steps)
    dist.destroy_process_group()
    return int(worst > options.limit)


def _measure(options: argparse.Namespace, steps: int) -> float:
    size = OuroOptions(size=options.size, attention=options.attention, recurrent_steps=steps)
    whole = Job(
        model=size,
        seq_len=options.seq_len,
        windows=options.batch,
        compiled=options.compile,
        masked=True,
    )
    jobs = [whole, dataclasses.replace(whole, trainable="exit_gate")]
    seconds = in_turn(
        [trainer_step(job, build(job)) for job in jobs], pairs=options.pairs, warmup=options.warmup
    )
    ratio = ratios(seconds[1], seconds[0])
    print(f"{steps:2} | {spread(seconds[0])} | {spread(seconds[1])} | {spread(ratio)}")
    return statistics.median(ratio)


if __name__ == "__main__":
    raise SystemExit(main())
