"""The gloo parity tests of `tests/distributed` on torchrun's ranks, with NCCL on GPUs.

    CUDA_VISIBLE_DEVICES= python tools/bench/nccl_parity.py --expect expected.pt
    torchrun --nproc-per-node=2 tools/bench/nccl_parity.py --against expected.pt

The first command trains every case in one process on a CPU; the second trains those layouts that
have as many ranks as it was started with, and prints the largest error of a loss or gradient, over
the largest entry of its tensor. Ends with code 1 if one is above the tolerance.

Last run with NCCL: never. With gloo it is a row of `gpu.sh --cpu`.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from conditions import parser_of  # adds the checkout to the path

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch import Tensor
from training_step import device, start

from tests.distributed.test_parity import (
    CASES,
    LAYOUTS,
    MORE_CASES,
    MORE_LAYOUTS,
    PAIRS,
    RELATIVE_TOLERANCE,
    Case,
    Layout,
    losses_and_gradients,
)

ALL_CASES = CASES | MORE_CASES
ALL_LAYOUTS = LAYOUTS | MORE_LAYOUTS
CUDA_TOLERANCE = 1e-4
"""Kernels of a GPU add in other orders than a CPU's; a guess until the first run on one."""

Result = tuple[list[float], dict[str, Tensor]]


def main() -> int:
    """Write the expected results, or compare with them."""
    parser = parser_of(__doc__)
    parser.add_argument("--expect", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    parser.add_argument("--attention", default="sdpa", help="sdpa, or flex on GPUs")
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, default=list(ALL_CASES))
    options = parser.parse_args()
    if (options.expect is None) == (options.against is None):
        parser.error("give one of --expect and --against")
    if options.expect is not None:
        needed = {case for _, case in PAIRS if case in options.cases}
        expected = {name: losses_and_gradients(Layout(), ALL_CASES[name]) for name in needed}
        torch.save(expected, options.expect)
        return 0
    start()
    met = _compare(options, torch.load(options.against))
    dist.destroy_process_group()
    return 0 if met else 1


def _compare(options: argparse.Namespace, expected: Mapping[str, Result]) -> bool:
    world, met = dist.get_world_size(), True
    tolerance = CUDA_TOLERANCE if device().type == "cuda" else RELATIVE_TOLERANCE
    _print("layout | case | largest error | tolerance | equal")
    for layout, name in PAIRS:
        ranks, degrees = ALL_LAYOUTS[layout]
        if ranks != world or name not in options.cases:
            continue
        torch.manual_seed(0)
        case = _with_attention(ALL_CASES[name], options.attention)
        with drawn_on_the_host():
            found = losses_and_gradients(degrees, case)
        error = _error(found, expected[name])
        met &= error <= tolerance
        equal = "yes" if error <= tolerance else "MISSED"
        _print(f"{layout} | {name} | {error:.1e} | {tolerance:.0e} | {equal}")
    return met


@contextmanager
def drawn_on_the_host() -> Iterator[None]:
    """Let `torch.rand` draw on the host, so that dropout has the masks of the expected result."""
    rand = torch.rand

    def drawn(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return rand(*size, **options).to(device)

    with patch.object(torch, "rand", drawn):
        yield


def _with_attention(case: Case, kernel: str) -> Case:
    return replace(case, options=(*case.options, ("attention", kernel)))


def _error(found: Result, expected: Result) -> float:
    """Return the largest error on any rank, relative to the largest entry of its tensor."""
    losses, gradients = found
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected[0], strict=True)]
    for name, wanted in expected[1].items():
        # What is added to all keys changes no attention: the gradient is rounding alone.
        scale = float(expected[1][name.replace("wk.bias", "wq.bias")].abs().max())
        error = float((gradients[name].cpu() - wanted).abs().max())
        errors.append(error / scale if scale else error)
    worst = torch.tensor(max(errors), device=device())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
