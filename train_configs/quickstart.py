"""The quick start: one looped layer on code, prose and mathematics, R = 4.

`bash tools/quickstart.sh` builds the corpus and runs the recipe. LOG.md has the measurements on two
cores that shape, tokens, vocabulary and batch were chosen by.
"""

from titan_loop.data.load.loader import WindowLoader
from titan_loop.models.families.ouro import OuroOptions
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

CORPUS = "corpora/quickstart"
TOTAL_TOKENS = 3_000_000
WINDOW_TOKENS = 256
BATCH_TOKENS = 4 * WINDOW_TOKENS


def quickstart() -> LoopTrainer.Config:
    """One looped layer of 0.3 M parameters on code, prose and mathematics; minutes on a CPU."""
    config = LoopTrainer.Config(
        dump_folder="runs/quickstart",
        total_tokens=TOTAL_TOKENS,
        model=OuroOptions(size="quickstart", n_layers=1, dim=96, hidden_dim=256),
        dataloader=WindowLoader.Config(
            mixture=[f"{CORPUS}/code=0.4", f"{CORPUS}/prose=0.4", f"{CORPUS}/math=0.2"]
        ),
        learning_rate=Schedule.warmup_cosine(
            1e-2, start=1e-3, warmup_tokens=150_000, total_tokens=TOTAL_TOKENS, final=1e-3
        ),
        entropy_weight=Schedule.constant(0.1),
        recurrence=RecurrenceConfig(steps=Schedule.constant(4)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
        held_out=HeldOutConfig(interval=600, depths=[1, 2, 4, 6], windows=16),
    )
    config.training.seq_len = WINDOW_TOKENS
    config.training.local_batch_size = 4
    config.checkpoint.interval = 600
    config.metrics.log_freq = 10
    config.metrics.enable_tensorboard = True
    return config
