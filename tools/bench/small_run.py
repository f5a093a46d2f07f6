"""A short run of the real trainer on a small prepared source, for `shares.py`."""

import argparse
from pathlib import Path

from tests.support.tiny import TINY_VOCABULARY
from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


def add_run_flags(parser: argparse.ArgumentParser, *, size: str) -> None:
    """Add `--size`, `--seq-len` and `--batch`."""
    parser.add_argument("--size", default=size)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")


def run_config(options: argparse.Namespace, source: Path, *, steps: int) -> LoopTrainer.Config:
    """Return a run of `steps` steps of one micro-batch on `source`."""
    tokens = options.batch * options.seq_len
    config = LoopTrainer.Config(
        total_tokens=steps * tokens,
        model=OuroOptions(size=options.size, vocab_size=max(TINY_VOCABULARY, 1024)),
        dataloader=WindowLoader.Config(mixture=[f"{source}=1"]),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(tokens)),
    )
    config.training.seq_len = options.seq_len
    config.training.local_batch_size = options.batch
    return config
