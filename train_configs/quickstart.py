"""The quick start: a one-million-parameter LoopLM on code, prose and mathematics, R = 4.

`bash tools/quickstart.sh` builds the corpus and runs the recipe. LOG.md has the measurements on two
cores that size, vocabulary and batch were chosen by.
"""

from titan_loop.data.load.loader import WindowLoader
from titan_loop.models.families.ouro import OuroOptions
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

CORPUS = "corpora/quickstart"
TOTAL_TOKENS = 700_000
WINDOW_TOKENS = 256
BATCH_TOKENS = 4 * WINDOW_TOKENS


def quickstart() -> LoopTrainer.Config:
    """A one-million-parameter LoopLM on code, prose and mathematics, R = 4; minutes on a CPU."""
    config = LoopTrainer.Config(
        dump_folder="runs/quickstart",
        total_tokens=TOTAL_TOKENS,
        model=OuroOptions(size="quickstart"),
        dataloader=WindowLoader.Config(
            mixture=[f"{CORPUS}/code=0.4", f"{CORPUS}/prose=0.4", f"{CORPUS}/math=0.2"]
        ),
        learning_rate=Schedule.warmup_cosine(
            6e-3, start=6e-4, warmup_tokens=35_000, total_tokens=TOTAL_TOKENS, final=6e-4
        ),
        entropy_weight=Schedule.constant(0.1),
        recurrence=RecurrenceConfig(steps=Schedule.constant(4)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
        held_out=HeldOutConfig(interval=100, depths=[1, 2, 4, 6], windows=16),
    )
    config.training.seq_len = WINDOW_TOKENS
    config.training.local_batch_size = 4
    config.checkpoint.interval = 200
    config.metrics.log_freq = 10
    config.metrics.enable_tensorboard = True
    return config
