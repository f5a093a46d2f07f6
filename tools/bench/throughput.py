"""Training throughput of a named size on random tokens: tokens/s, MFU and peak memory per R.

    python tools/bench/throughput.py --size 134m --recurrent-steps 1 4 --seq-len 4096 --compile
    python tools/bench/throughput.py --size 374m --seq-len 4096 --compile --operations 20

Forward, backward, clipping and the AdamW update of the real trainer's parts, on one device, without
a loader; R = 1 is without exit gate. Prints one row per R: the median step of `--steps` after
`--warmup` and its range. `--operations N` then lists the N operations that take most of a step and
what bounds each (see `roofline.py`). Refuses to run beside another load. Runs unchanged on a GPU,
where parameters are bf16 under FSDP.
"""

import argparse
import gc
import statistics

import torch.distributed as dist
from conditions import begin, parser_of
from roofline import print_operations
from timing import in_turn
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.tools import utils as titan_utils
from training_step import Job, build, device, flops_per_step, mfu, start, trainer_step

from titan_loop.families.ouro.model import OuroOptions


def main() -> int:
    """Measure every R asked for and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--full-checkpointing", action="store_true")
    parser.add_argument("--float8", default="off", help="torchao's recipe, such as rowwise")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--operations", type=int, default=0, help="how many to list; 0 for none")
    options = begin(parser, start=start)
    print(" R | tokens/s (range) | MFU | peak memory GiB | step s")
    for steps in options.recurrent_steps:
        _measure(options, steps)
        gc.collect()  # a model under FSDP has cycles; a later row's peak must not hold it
        titan_utils.device_module.empty_cache()
    dist.destroy_process_group()
    return 0


def _measure(options: argparse.Namespace, steps: int) -> None:
    job = Job(
        model=OuroOptions(
            size=options.size,
            attention=options.attention,
            recurrent_steps=steps,
            exit_gate=steps > 1,
        ),
        seq_len=options.seq_len,
        windows=options.batch,
        compiled=options.compile,
        checkpointing=FullAC.Config() if options.full_checkpointing else None,
        masked=True,
        float8=options.float8,
    )
    step = trainer_step(job, build(job))
    in_turn([step], pairs=0, warmup=options.warmup)
    titan_utils.device_module.reset_peak_memory_stats()
    (seconds,) = in_turn([step], pairs=options.steps, warmup=0)
    median = statistics.median(seconds)
    memory = titan_utils.device_module.memory_stats(device())["reserved_bytes.all.peak"] / 2**30
    low, high = job.tokens / max(seconds), job.tokens / min(seconds)
    print(
        f"{steps:2} | {job.tokens / median:,.0f} ({low:,.0f}-{high:,.0f}) | "
        f"{mfu(flops_per_step(job), seconds)} | {memory:.2f} | {median:.3f}"
    )
    if options.operations:
        print_operations(step, options.operations)


if __name__ == "__main__":
    raise SystemExit(main())
