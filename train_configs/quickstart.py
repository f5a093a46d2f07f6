"""The quick start: one looped layer on code, prose and mathematics, R = 4.

`bash tools/quickstart.sh` builds the corpus and runs the recipe. LOG.md has the measurements on two
cores that shape, tokens, vocabulary and batch were chosen by.
"""

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.models.families.ouro import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.recurrence import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

CORPUS = "corpora/quickstart"
WINDOW_TOKENS = 256
BATCH_TOKENS = 4 * WINDOW_TOKENS

# Layers, D, F, R, tokens. Tokens make the FLOPs of layers and readouts, R (layers + head), equal.
CANDIDATES = {
    "d96_r4": (1, 96, 256, 4, 3_000_000),
    "d96_r2": (1, 96, 256, 2, 6_000_000),
    "d96_l2_r2": (2, 96, 256, 2, 3_900_000),
    "d128_r2": (1, 128, 384, 2, 3_600_000),
    "d128_r4": (1, 128, 384, 4, 1_800_000),
}
TABLES = {
    "quickstart_search": [
        ResultTable(
            name="bits",
            title="held-out bits per byte",
            rows={
                f"{name} R={r}": {"stage": name, "reading": f"static:{r}"}
                for name in CANDIDATES
                for r in (1, CANDIDATES[name][3])
            },
            columns={task: {"task": f"held_out/{task}"} for task in ("code", "prose", "math")},
            everywhere={"metric": "bits_per_byte"},
            factor=1.0,
            digits=3,
        )
    ]
}


def quickstart() -> LoopTrainer.Config:
    """One looped layer of 0.3 M parameters on code, prose and mathematics; minutes on a CPU."""
    return _config("d96_r4", "runs/quickstart")


def quickstart_search() -> Recipe:
    """Shapes, depths and tokens that cost what the quick start costs."""
    stages = [Stage(name=name, config=_config(name)) for name in CANDIDATES]
    for stage in stages:
        stage.config.held_out = HeldOutConfig(depths=[1, 2, 4], windows=64)
        stage.config.checkpoint.interval = 2000
    return Recipe(name="quickstart_search", stages=stages)


def _config(name: str, folder: str = "") -> LoopTrainer.Config:
    layers, dim, hidden_dim, steps, tokens = CANDIDATES[name]
    config = LoopTrainer.Config(
        dump_folder=folder,
        total_tokens=tokens,
        model=OuroOptions(size="quickstart", n_layers=layers, dim=dim, hidden_dim=hidden_dim),
        dataloader=WindowLoader.Config(
            mixture=[f"{CORPUS}/code=0.4", f"{CORPUS}/prose=0.4", f"{CORPUS}/math=0.2"]
        ),
        learning_rate=Schedule.warmup_cosine(
            1e-2, start=1e-3, warmup_tokens=150_000, total_tokens=tokens, final=1e-3
        ),
        entropy_weight=Schedule.constant(0.1),
        recurrence=RecurrenceConfig(steps=Schedule.constant(steps)),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
        held_out=HeldOutConfig(interval=600, depths=[1, 2, 4, 6], windows=16),
    )
    config.training.seq_len = WINDOW_TOKENS
    config.training.local_batch_size = 4
    config.checkpoint.interval = 600
    config.metrics.log_freq = 10
    config.metrics.enable_tensorboard = True
    return config
