"""Small real parts for tests: a tokenised source and a run that trains on it in seconds."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import titan_loop.compat as compat  # before any torchtitan module
import torch.distributed as dist

from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.prepare.make_tokenizer import train_tokenizer
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.start import start
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.callback import Callback
from titan_loop.training.config import RunConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer

SEQ_LEN = 32
BATCH_WINDOWS = 8
BATCH_TOKENS = BATCH_WINDOWS * SEQ_LEN
TINY_VOCABULARY = 300


def standard_library_texts(count: int) -> list[str]:
    """Return the start of the first `count` modules of Python's standard library, by name.

    Every machine has this text, and changes to this project do not alter it, so measurements on it
    stay comparable.
    """
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8")[:10_000] for path in files]


def tiny_source(folder: Path, *, documents: int = 60) -> Path:
    """Tokenise a part of Python's standard library; about 500 KB of text.

    Returns:
        The prepared source's folder.
    """
    raw = folder / "raw.jsonl"
    texts = standard_library_texts(documents)
    lines = [json.dumps({"id": str(i), "text": text}) for i, text in enumerate(texts)]
    raw.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer([raw], vocab_size=TINY_VOCABULARY, output=folder / "tokenizer.json")
    source = folder / "source"
    tokenize_source(raw, output=source, tokenizer=tokenizer, held_out_fraction=0.2)
    return source


def tiny_config(source: Path, dump_folder: Path, *, steps: int = 6) -> LoopTrainer.Config:
    """Return a run of `steps` steps: R falls from 4 to 2 in the middle, all schedules move."""
    total = steps * BATCH_TOKENS
    config = LoopTrainer.Config(
        dump_folder=str(dump_folder),
        total_tokens=total,
        model=OuroOptions(size="debugmodel"),
        dataloader=WindowLoader.Config(mixture=[f"{source}=1"]),
        learning_rate=Schedule.warmup_cosine(
            3e-3, warmup_tokens=BATCH_TOKENS, total_tokens=total, start=3e-4
        ),
        entropy_weight=Schedule.steps([(0, 0.1), (total // 2, 0.05)]),
        recurrence=RecurrenceConfig(steps=Schedule.steps([(0, 4), (total // 2, 2)])),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
    )
    config.held_out.interval = 0
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = 4
    config.checkpoint.interval = 2
    config.metrics.log_freq = 1
    return config


def train_run(
    config: RunConfig,
    *,
    callbacks: Sequence[Callback] = (),
    stop_listener: StopListener | None = None,
) -> None:
    """Train one run as `titan-loop train` does, alone or as a rank of a pool, whose group stays."""
    rank, _ = compat.start_runtime()
    compat.start_logging(rank)
    config = replace(config, callbacks=(*config.callbacks, *callbacks))
    start(config, stop_listener=stop_listener)


def act_as_launched(world_size: int) -> None:
    """Set the environment of a rank as a launcher would, and skip upstream's pause at a run's end.

    Args:
        world_size: Number of ranks in the pool this is called in; 1 outside a pool.
    """
    os.environ.update(
        RANK=str(dist.get_rank() if dist.is_initialized() else 0),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    compat.skip_final_pause()
