"""Under which conditions a benchmark runs: alone on its machine, and on which one."""

import argparse
import os
import subprocess
import sys

import torch

BUSY_LOAD = 1.0
"""Load average above which another job would be measured, too."""


def add_load_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--beside-load`."""
    parser.add_argument("--beside-load", action="store_true", help="measure on a busy machine")


def require_quiet_machine(options: argparse.Namespace) -> None:
    """Exit with code 2 beside another load, unless `--beside-load` was given."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD and not options.beside_load:
        print(f"load average {load:.1f}: wait, or pass --beside-load", file=sys.stderr)
        raise SystemExit(2)


def machine(device: torch.device | None = None) -> str:
    """Return the processor, its threads and torch's version, for the table's heading."""
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        found = [line.split(":")[1].strip() for line in lines.splitlines() if "Model name" in line]
        name = f"{found[0] if found else 'CPU'}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"
