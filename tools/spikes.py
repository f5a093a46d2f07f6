"""Trains a tiny model through spikes made on purpose and prints what the run decided.

    python tools/spikes.py [FOLDER]

Windows with wrong labels come at steps 14, 15 and 23, and a layer goes bad after step 30. It takes
half a minute on one core, and needs no data.
"""

import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.support

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

from tests.support.spikes import Spikes
from tests.support.tiny import BATCH_TOKENS, BATCH_WINDOWS, tiny_config, tiny_source
from titan_loop.recipes.recipe import Recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.decisions import decision_rows
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

STEPS = 40
BAD_WINDOWS = (*range(104, 120), *range(192, 200))
"""What steps 14 and 15 read, and step 23 once it reads 16 windows further."""

POISONED_AFTER = 30


def demonstration(source: Path, folder: Path) -> LoopTrainer.Config:
    """Return the run: a checkpoint every four steps, two spikes within eight steps go back."""
    config = tiny_config(source, folder, steps=STEPS)
    config.learning_rate = Schedule.warmup_cosine(
        3e-3, warmup_tokens=4 * BATCH_TOKENS, total_tokens=STEPS * BATCH_TOKENS
    )
    config.entropy_weight = Schedule.constant(0.05)
    config.recurrence.steps = Schedule.constant(4)
    config.training.local_batch_size = BATCH_WINDOWS // 2
    config.checkpoint.interval = 4
    config.stability.skip_spikes = True
    config.stability.window = 8
    config.stability.skips = 2
    config.callbacks = (Spikes(BAD_WINDOWS, poisoned_after=POISONED_AFTER),)
    return config


def main() -> None:
    """Train, then print the table of decisions as Markdown."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "run"
        config = demonstration(tiny_source(Path(scratch)), folder)
        run_recipe(Recipe.of_one_run("spikes", config))
        header, *rows = decision_rows(RunDirectory(folder).read_decisions())
        for row in (header, ["---"] * len(header), *rows):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
