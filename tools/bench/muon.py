"""Muon beside AdamW: time of a training step and of its update alone, and memory.

    python tools/bench/muon.py --size quickstart
    python tools/bench/muon.py --size quickstart --worlds 2        # gloo ranks of one thread each

Both train the same model on the same random tokens, in turn, in the same processes; the ratios are
medians over the rounds. State is what the optimisers keep; extra is the peak of an update alone.
`--dtype` is that of Muon's iteration. A world of 1 runs on this machine's device, a GPU if any.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, spread
from torch import Tensor
from training_step import Job, build, device, start, step_parser, trainer_step

from tests.support.allocations import AllocationTrace
from tests.support.multiprocess import GlooPool
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.initialisation import local_part
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.optimizers.muon import MuonConfig

NAMES: tuple[str, ...] = ("adamw", "muon")
MB = 1e6


def main() -> int:
    """Print a table per world."""
    parser = step_parser(__doc__)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="windows of a rank")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1])
    options = begin(parser)
    print("ranks | optimiser | step, s | update, s | state, MB | extra, MB")
    for world in options.worlds:
        if world == 1:
            start()
            rows = measure(options)
            dist.destroy_process_group()
        else:
            pool = GlooPool(world)
            rows = pool.run(measure, options, timeout=3600)[0]
            pool.close()
        print("\n".join(f"{world} | {row}" for row in rows))
    return 0


def measure(options: argparse.Namespace) -> list[str]:
    """Return a row for each optimiser and one of their ratios; collective."""
    model = OuroOptions(size=options.size, recurrent_steps=options.recurrent_steps)
    job = Job(model=model, seq_len=options.seq_len, windows=options.batch, masked=True)
    models = [build(job) for _ in NAMES]
    optimizers = [
        _optimizers(name, options.dtype, each) for name, each in zip(NAMES, models, strict=True)
    ]
    steps = [
        trainer_step(job, each, optimizer)
        for each, optimizer in zip(models, optimizers, strict=True)
    ]
    timing = {"pairs": options.pairs, "warmup": options.warmup}
    whole = in_turn(steps, **timing)
    update = in_turn([optimizer.step for optimizer in optimizers], **timing)
    rows = [
        f"{name} | {spread(whole[i])} | {spread(update[i], 4)} | "
        f"{_state_bytes(optimizers[i]) / MB:.1f} | {_extra_bytes(optimizers[i].step) / MB:.1f}"
        for i, name in enumerate(NAMES)
    ]
    slower = [statistics.median(ratios(part[1], part[0])) for part in (whole, update)]
    return [*rows, f"muon over adamw | {slower[0]:.2f} | {slower[1]:.2f} | |"]


def _optimizers(
    name: str, dtype: Literal["auto", "float32", "bfloat16"], model: LoopDecoder
) -> LoopOptimizers:
    config = LoopOptimizers.Config()
    if name == "muon":
        config.chosen = MuonConfig(dtype=dtype)
    optimizers = config.build(model_parts=[model])
    optimizers.set_learning_rate(1e-4)
    return optimizers


def _state_bytes(optimizers: LoopOptimizers) -> int:
    state = optimizers.state_dict().items()
    return sum(
        local_part(value).nbytes
        for name, value in state
        if isinstance(value, Tensor) and not name.endswith(".step")
    )


def _extra_bytes(update: Callable[[], object]) -> int:
    if device().type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        update()
        return torch.cuda.max_memory_allocated() - before
    with AllocationTrace() as trace:
        update()
    return trace.peak_bytes


if __name__ == "__main__":
    raise SystemExit(main())
