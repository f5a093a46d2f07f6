"""The start of every benchmark: its flags, a quiet machine, and the heading that names both.

options = begin(parser_of(__doc__))
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import titan_loop.compat  # noqa: F401  isort: skip  (before any torchtitan module)
import torch

from titan_loop.evaluation.share_work import rank_device

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for tests.support

BUSY_PROCESSORS = 0.3
"""Processors that others keep busy above which a benchmark would measure them, too."""
BUSY_GPU_BYTES = 2 * 2**30
"""Memory in use on an otherwise empty GPU: the driver's, and this process' context."""
SAMPLE_SECONDS = 2.0


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser described by the first line of a program's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--beside-load", action="store_true", help="measure on a busy machine")
    return parser


def begin(
    parser: argparse.ArgumentParser,
    *,
    start: Callable[[], object] = lambda: None,
    device: torch.device | None = None,
) -> argparse.Namespace:
    """Parse the flags, refuse to run beside another load, and print the command and the machine.

    Call it before the benchmark starts anything: whatever computes during the two seconds in which
    it looks belongs to others. It then exits with code 2, unless `--beside-load` was given.

    Args:
        parser: From `parser_of`, with the program's own flags.
        start: Sets threads and device, before they are printed.
        device: The device that computes; None for this process's.
    """
    options = parser.parse_args()
    if not options.beside_load:
        _require_quiet_machine()
    start()
    print(" ".join(sys.argv), "|", machine(device or rank_device()))
    return options


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """Yield the top of a worktree of another revision, which is removed afterwards."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[2]), "worktree"]
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch) / "checkout"
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), revision], check=True)
        try:
            yield other
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)


def _require_quiet_machine() -> None:
    found: list[str] = []
    busy = _processors_of_others()
    if busy > BUSY_PROCESSORS:
        found.append(f"other processes keep {busy:.1f} of {os.cpu_count()} processors busy")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = total - free - torch.cuda.memory_reserved()
        if used > BUSY_GPU_BYTES:
            found.append(f"others hold {used / 2**30:.1f} GiB of the GPU")
    if found:
        fix = "wait until they end, or pass --beside-load"
        print(f"{' and '.join(found)}; {fix}", file=sys.stderr)
        raise SystemExit(2)


def _busy_seconds(stat: str) -> float:
    """Return the processor time of all processes since the machine started.

    Args:
        stat: Text of `/proc/stat`. Time spent waiting for a disk or for another virtual machine is
            not counted.
    """
    _, user, nice, system, _, _, interrupt, soft_interrupt, *_ = stat.split()
    ticks = sum(map(int, (user, nice, system, interrupt, soft_interrupt)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _processors_of_others() -> float:
    """Return how many processors others keep busy, while this process sleeps."""
    stat = Path("/proc/stat")
    before, own_before, began = (
        _busy_seconds(stat.read_text()),
        time.process_time(),
        time.monotonic(),
    )
    time.sleep(SAMPLE_SECONDS)
    own = time.process_time() - own_before
    return (_busy_seconds(stat.read_text()) - before - own) / (time.monotonic() - began)


def machine(device: torch.device) -> str:
    """Return the processor, its threads and torch's version."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        found = [line.split(":")[1].strip() for line in lines.splitlines() if "Model name" in line]
        name = f"{found[0] if found else 'CPU'}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"
