"""Shares of loader, logging and checkpoints in a training run, in the real trainer.

    python tools/bench/shares.py
    python tools/bench/shares.py --size 134m --seq-len 4096 --batch 8 --steps 60        # a GPU

Trains `--steps` steps on a small prepared source, with a checkpoint every `--interval` steps and
logging on every step, and times the calls the trainer makes. On CUDA these are the host's seconds,
which overlap with the device's unless they wait for it. Shares are of the loop's time without the
first, slow steps.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from conditions import begin, parser_of
from small_run import add_run_flags, run_config

from tests.support.tiny import tiny_source
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.data.load.loader import WindowLoader
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.training.metrics_processor import LoopMetricsProcessor
from titan_loop.training.trainer import LoopTrainer

WARMUP_STEPS = 5


def main() -> int:
    """Train and print the shares."""
    parser = parser_of(__doc__)
    add_run_flags(parser, size="quickstart")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    options = begin(parser)
    seconds: dict[str, list[float]] = defaultdict(list)
    step = _timed(LoopTrainer, "train_step", seconds)
    _timed(WindowLoader, "read_step", seconds)
    _timed(LoopMetricsProcessor, "log_step", seconds)
    _timed(LoopCheckpointManager, "save", seconds)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run_recipe(Recipe.of_one_run("shares", _config(options, Path(folder))))
        whole = time.perf_counter() - began
    loop = sum(seconds[step][WARMUP_STEPS:]) + sum(seconds["save"][WARMUP_STEPS:])
    print("part | calls | seconds | of the loop")
    for name in ("train_step", "read_step", "log_step", "save"):
        counted = seconds[name][WARMUP_STEPS:]
        print(f"{name} | {len(counted)} | {sum(counted):.3f} | {sum(counted) / loop:.2%}")
    first = seconds[step][0]
    print(f"start-up, compilation of step 1 and end: {whole - loop:.1f} s (step 1: {first:.2f} s)")
    return 0


def _timed(owner: type, name: str, seconds: dict[str, list[float]]) -> str:
    """Let every call of a method record its time."""
    method = getattr(owner, name)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            seconds[name].append(time.perf_counter() - began)

    setattr(owner, name, timed)
    return name


def _config(options: argparse.Namespace, folder: Path) -> LoopTrainer.Config:
    config = run_config(options, tiny_source(folder), steps=options.steps)
    config.dump_folder = str(folder / "run")
    config.checkpoint.interval = options.interval
    config.metrics.log_freq = 1
    return config


if __name__ == "__main__":
    raise SystemExit(main())
