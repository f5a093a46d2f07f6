"""FSDP's policies on a loop: a training step per_visit and per_step, also on a slow network.

    python tools/bench/fsdp_policies.py
    python tools/bench/fsdp_policies.py --worlds 2 --gigabytes-per-second 0.1

Every rank is a gloo process of one thread. With `--gigabytes-per-second` each collective waits for
the bytes a rank would receive through a link of that speed, as on hundreds of nodes; gloo does not
overlap it with computing, so this is the worst case. Both policies train in turn in the same
processes; collectives and bytes are counted at the process group.
"""

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from conditions import begin
from timing import in_turn, ratios, spread
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_step import Job, build, step_parser, trainer_step

from tests.support.multiprocess import GlooPool
from titan_loop.families.ouro.model import OuroOptions

POLICIES = ("per_visit", "per_step")
COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_")


class SlowLink(TorchDispatchMode):
    """Counts FSDP's collectives, and lets each take the time its bytes need on a slower link."""

    def __init__(self, bytes_per_second: float | None) -> None:
        super().__init__()
        self.bytes_per_second = bytes_per_second
        self.count = 0
        self.received: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in COLLECTIVES:
            whole = max(tensor.nbytes for tensor in args[:2] if isinstance(tensor, Tensor))
            received = int(whole * (1 - 1 / dist.get_world_size()))
            self.count += 1
            self.received[name] += received
            if self.bytes_per_second is not None:
                time.sleep(received / self.bytes_per_second)
        return func(*args, **(kwargs or {}))


def main() -> int:
    """Print a row per world and link."""
    parser = step_parser(__doc__)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gigabytes-per-second", type=float, nargs="*", default=[0.2, 0.05])
    options = begin(parser, device=torch.device("cpu"))
    print("ranks | GB/s | policy | collectives | MB received | step s | per_visit over it")
    for world in options.worlds:
        pool = GlooPool(world)
        try:
            for link in (None, *options.gigabytes_per_second):
                (rows, *_) = pool.run(_measure, vars(options), link, timeout=300)
                for row in rows:
                    print(f"{world} | {link or 'gloo'} | {row}")
        finally:
            pool.close()
    return 0


def _measure(options: dict[str, Any], gigabytes_per_second: float | None) -> list[str]:
    """Return a row for each policy, on every rank."""
    rate = None if gigabytes_per_second is None else gigabytes_per_second * 1e9
    steps, links = [], []
    for policy in POLICIES:
        job = Job(
            model=OuroOptions(size=options["size"], recurrent_steps=options["recurrent_steps"]),
            seq_len=options["seq_len"],
            windows=options["batch"],
            fsdp_policy=policy,
        )
        train = trainer_step(job, build(job))
        train()
        link = SlowLink(rate)
        with link:
            train()
        links.append((link.count, sum(link.received.values())))
        steps.append(_through(train, rate))
    times = in_turn(steps, pairs=options["pairs"], warmup=options["warmup"])
    return [
        f"{policy} | {count} | {received / 1e6:.1f} | {spread(seconds)} | "
        f"{spread(ratios(times[0], seconds), 2)}"
        for policy, (count, received), seconds in zip(POLICIES, links, times, strict=True)
    ]


def _through(train: Any, rate: float | None) -> Any:
    def step() -> None:
        with SlowLink(rate):
            train()

    return step


if __name__ == "__main__":
    raise SystemExit(main())
