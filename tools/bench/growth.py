"""How time and memory of a training step grow with R, with the window, and with the ranks.

    python tools/bench/growth.py
    python tools/bench/growth.py --size 134m --seq-lens 1024 2048 4096 8192 --batch 4   # a GPU

Expected: time ∝ FLOPs in R and in the window (of which attention is the quadratic part); memory
linear in R. The last column is the time over what the row before and the FLOPs predict. Worlds
beyond one run on gloo, one thread a rank, with the same batch per rank: on two cores more than two
ranks share them, so their time must grow.
"""

import argparse
import statistics
import sys

import torch.distributed as dist
from conditions import add_load_flag, machine, require_quiet_machine
from training_step import (
    Job,
    add_step_flags,
    build,
    device,
    extra_bytes,
    flops_per_step,
    in_turn,
    spread,
    start,
    trainer_step,
)

from titan_loop.models.sizes import ModelOptions
from titan_loop.testing.multiprocess import GlooPool


def main() -> int:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=2)
    add_step_flags(parser, pairs=3)
    add_load_flag(parser)
    options = parser.parse_args()
    require_quiet_machine(options)
    start()
    print(" ".join(sys.argv), "|", machine(device()))
    shortest = options.seq_lens[0]
    by_steps = [_job(options, steps, shortest) for steps in options.recurrent_steps]
    _table(options, f"R at L = {shortest}", options.recurrent_steps, by_steps)
    by_length = [_job(options, 4, seq_len, windows=1) for seq_len in options.seq_lens]
    _table(options, "L at R = 4, one window", options.seq_lens, by_length)
    dist.destroy_process_group()
    if device().type == "cpu":
        _worlds(options, _job(options, 4, shortest))
    return 0


def _job(
    options: argparse.Namespace, steps: int, seq_len: int, *, windows: int | None = None
) -> Job:
    return Job(
        model=ModelOptions(size=options.size, recurrent_steps=steps, exit_gate=steps > 1),
        seq_len=seq_len,
        windows=windows or options.batch,
    )


def _table(options: argparse.Namespace, title: str, values: list[int], jobs: list[Job]) -> None:
    print(f"\n{title} | step s | tokens/s | GFLOP | extra MB | time over FLOPs, to the row before")
    before: tuple[float, int] | None = None
    for value, job in zip(values, jobs, strict=True):
        model = build(job)
        step = trainer_step(job, model)
        (seconds,) = in_turn([step], pairs=options.pairs, warmup=options.warmup)
        median, flops = statistics.median(seconds), flops_per_step(job)
        growth = "-" if before is None else f"{median / before[0] / (flops / before[1]):.2f}"
        print(
            f"{value} | {spread(seconds)} | {job.tokens / median:,.0f} | {flops / 1e9:.1f} | "
            f"{extra_bytes(step, model) / 1e6:.0f} | {growth}"
        )
        before = median, flops


def _worlds(options: argparse.Namespace, job: Job) -> None:
    print("\nranks, R = 4, per_step | step s | tokens/s of all")
    for world in options.worlds:
        pool = GlooPool(world)
        try:
            (seconds, *_) = pool.run(_timed, job, options.pairs, options.warmup, timeout=300)
        finally:
            pool.close()
        rate = world * job.tokens / statistics.median(seconds)
        print(f"{world} | {spread(seconds)} | {rate:,.0f}")


def _timed(job: Job, pairs: int, warmup: int) -> list[float]:
    (seconds,) = in_turn([trainer_step(job, build(job))], pairs=pairs, warmup=warmup)
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
