"""Growth of a training step's time and memory with R, with the window, and with the ranks.

    python tools/bench/growth.py
    python tools/bench/growth.py --size 134m --seq-lens 1024 2048 4096 8192 --batch 4   # a GPU

The jobs of a table take turns. Beside each row stands what it takes over the expected law:

- time ∝ FLOPs in R and in the window, of attention those of half its square, which is all that a
  causal kernel computes; memory linear in both; all relative to the first row;
- over ranks (gloo, one thread a rank, the same batch per rank): the time of one rank alone, times
  ranks a core where there are more ranks than cores, and one all-reduce of the gradients, timed
  alone, whose bytes are those of a gather and a reduction; the memory of one rank alone, and the
  gathered parameters and unreduced gradients beside it.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, seconds_of, spread
from torch import nn
from training_step import Job, build, device, extra_bytes, start, step_parser, trainer_step

from tests.support.multiprocess import GlooPool
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config


def main() -> int:
    """Print the three tables."""
    parser = step_parser(__doc__)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=2)
    options = begin(parser, start=start)
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
        model=OuroOptions(size=options.size, recurrent_steps=steps, exit_gate=steps > 1),
        seq_len=seq_len,
        windows=windows or options.batch,
    )


def _table(options: argparse.Namespace, title: str, values: list[int], jobs: list[Job]) -> None:
    print(f"\n{title} | step s | tokens/s | causal GFLOP | time over law | extra MB | MB over law")
    models = [build(job) for job in jobs]
    steps = [trainer_step(job, model) for job, model in zip(jobs, models, strict=True)]
    taken = in_turn(steps, pairs=options.pairs, warmup=options.warmup)
    flops = [_causal_flops(job) for job in jobs]
    extra = [extra_bytes(step, model) for step, model in zip(steps, models, strict=True)]
    for row, (value, job) in enumerate(zip(values, jobs, strict=True)):
        law = flops[row] / flops[0]
        over = [ratio / law for ratio in ratios(taken[row], taken[0])]
        print(
            f"{value} | {spread(taken[row])} | {job.tokens / statistics.median(taken[row]):,.0f} | "
            f"{flops[row] / 1e9:.1f} | {spread(over, 2)} | {extra[row] / 1e6:.0f} | "
            f"{extra[row] / extra[0] / (value / values[0]):.2f}"
        )


def _causal_flops(job: Job) -> int:
    """Return a step's FLOPs, for attention those of L / 2 keys a query, the mean."""
    config = decoder_config(job.model, max_seq_len=job.seq_len)
    return job.tokens * int(config.training_flops(job.seq_len // 2, config.recurrent_steps).total)


def _worlds(options: argparse.Namespace, job: Job) -> None:
    print(
        "\nranks, R = 4, per_step | step s | tokens/s of all | all-reduce s | time over law | "
        "extra MB of a rank | MB over law"
    )
    worlds = sorted({1, *options.worlds})
    pools = [GlooPool(world) for world in worlds]
    try:
        # Idle ranks wait for their pipe without taking a core.
        gradient_bytes, *_ = [pool.run(_prepare, job, timeout=300)[0] for pool in pools]
        rounds = [
            [pool.run(_timed, timeout=300)[0] for pool in pools]
            for _ in range(options.warmup + options.pairs)
        ][options.warmup :]
        extra = [pool.run(_extra_bytes, timeout=300)[0] for pool in pools]
    finally:
        for pool in pools:
            pool.close()
    cores = len(os.sched_getaffinity(0))
    for index, world in enumerate(worlds):
        taken = [row[index][0] for row in rounds]
        reducing = [row[index][1] for row in rounds]
        laws = [row[0][0] * max(1.0, world / cores) + row[index][1] for row in rounds]
        law_bytes = extra[0] + (2 * gradient_bytes if world > 1 else 0)
        print(
            f"{world} | {spread(taken)} | {world * job.tokens / statistics.median(taken):,.0f} | "
            f"{spread(reducing)} | {spread(ratios(taken, laws), 2)} | {extra[index] / 1e6:.0f} | "
            f"{extra[index] / law_bytes:.2f}"
        )


@dataclass
class _OnRank:
    """What one rank keeps between the rounds."""

    step: Callable[[], object]
    model: nn.Module
    gradients: torch.Tensor


_on_rank: list[_OnRank] = []


def _prepare(job: Job) -> int:
    """Build this rank's model; return the bytes of all gradients, unsharded."""
    model = build(job)
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    _on_rank.append(_OnRank(trainer_step(job, model), model, gradients))
    return gradients.nbytes


def _timed() -> tuple[float, float]:
    """Time one step, and an all-reduce of as many bytes as it gathers and reduces."""
    rank = _on_rank[0]
    dist.barrier()
    taken = seconds_of(rank.step)
    dist.barrier()
    return taken, seconds_of(lambda: dist.all_reduce(rank.gradients))


def _extra_bytes() -> int:
    rank = _on_rank[0]
    return extra_bytes(rank.step, rank.model)


if __name__ == "__main__":
    raise SystemExit(main())
