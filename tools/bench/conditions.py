"""Under which conditions a benchmark runs: alone on its machine, and on which one."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

BUSY_PROCESSORS = 0.3
"""Processors that others keep busy above which a benchmark would measure them, too."""
BUSY_GPU_BYTES = 2 * 2**30
"""Memory in use on an otherwise empty GPU: the driver's, and this process' context."""
SAMPLE_SECONDS = 2.0


def add_load_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--beside-load`."""
    parser.add_argument("--beside-load", action="store_true", help="measure on a busy machine")


def require_quiet_machine(options: argparse.Namespace) -> None:
    """Exit with code 2 beside another load, unless `--beside-load` was given.

    To be called before the benchmark starts anything: whatever computes during the next two seconds
    belongs to others.
    """
    if options.beside_load:
        return
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
        stat: Text of `/proc/stat`; time waited for a disk or for another virtual machine is no
            process'.
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


def machine(device: torch.device | None = None) -> str:
    """Return the processor, its threads and torch's version, for the table's heading."""
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        found = [line.split(":")[1].strip() for line in lines.splitlines() if "Model name" in line]
        name = f"{found[0] if found else 'CPU'}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"
