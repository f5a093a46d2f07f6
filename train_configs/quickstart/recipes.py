"""The quick start: one looped layer on code, prose and mathematics, R = 4.

`bash tools/quickstart.sh` builds the corpus and runs the recipe. README.md has the
measurements on two cores that shape, tokens, vocabulary and batch were chosen by.
"""

from typing import NamedTuple

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.evaluation_config import HeldOutConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

CORPUS = "corpora/quickstart"
WINDOW_TOKENS = 256
BATCH_TOKENS = 4 * WINDOW_TOKENS
QUICK_TOKENS = 3_000_000


class Candidate(NamedTuple):
    """A model and its tokens; all candidates cost about as much as the quick start.

    Attributes:
        layers: Unique layers.
        dim: D.
        hidden_dim: F.
        tokens: Tokens to train on.
        steps: R against tokens.
        final_rate: Learning rate at the end.
        optimizer: Its name.
        exit_gate: Whether it learns after which step to stop, from the loss of every step;
            otherwise only the last step has a loss.
    """

    layers: int
    dim: int
    hidden_dim: int
    tokens: int
    steps: Schedule
    final_rate: float = 1e-3
    optimizer: str = "adamw"
    exit_gate: bool = True


def _grown(second: int, fourth: int) -> Schedule:
    """Return R = 1, 2 from `second` tokens and 4 from `fourth`."""
    return Schedule.steps([(0, 1), (second, 2), (fourth, 4)])


# A step of one thread takes about (12 + 32·R) ms at D 96; tokens make its sum over a run equal.
CANDIDATES = {
    "d96_r4": Candidate(1, 96, 256, 3_000_000, Schedule.constant(4)),
    "d96_r2": Candidate(1, 96, 256, 5_600_000, Schedule.constant(2)),
    "d96_grown": Candidate(1, 96, 256, 5_200_000, _grown(1_800_000, 3_600_000)),
    "d96_grown_to_0": Candidate(1, 96, 256, 5_200_000, _grown(1_800_000, 3_600_000), 1e-4),
    "d96_to_0": Candidate(1, 96, 256, 3_000_000, Schedule.constant(4), 1e-4),
    "d96_muon": Candidate(1, 96, 256, 2_800_000, Schedule.constant(4), 1e-3, "muon"),
    "d96_muon_to_0": Candidate(1, 96, 256, 2_800_000, Schedule.constant(4), 1e-4, "muon"),
    "d96_muon_grown_to_0": Candidate(
        1, 96, 256, 4_800_000, _grown(1_600_000, 3_200_000), 1e-4, "muon"
    ),
    "d96_muon_last": Candidate(
        1, 96, 256, 3_400_000, Schedule.constant(4), 1e-4, "muon", exit_gate=False
    ),
    "d96_muon_last_grown": Candidate(
        1, 96, 256, 5_000_000, _grown(1_000_000, 2_500_000), 1e-4, "muon", exit_gate=False
    ),
    "d128_muon_last": Candidate(
        1, 128, 384, 2_400_000, Schedule.constant(4), 1e-4, "muon", exit_gate=False
    ),
    "d96_l2_muon_r2": Candidate(2, 96, 256, 3_400_000, Schedule.constant(2), 1e-4, "muon"),
    "d128_muon_r4": Candidate(1, 128, 384, 1_900_000, Schedule.constant(4), 1e-4, "muon"),
    "d96_l2_r2": Candidate(2, 96, 256, 3_700_000, Schedule.constant(2)),
    "d128_r2": Candidate(1, 128, 384, 3_600_000, Schedule.constant(2)),
    "d128_r4": Candidate(1, 128, 384, 1_900_000, Schedule.constant(4)),
    "d128_grown": Candidate(1, 128, 384, 3_300_000, _grown(1_200_000, 2_300_000)),
}
TABLES = {
    "quickstart": [
        ResultTable(
            name="bits_per_byte",
            title="held-out bits per byte",
            rows={f"R = {steps}": {"reading": f"static:{steps}"} for steps in range(1, 7)},
            columns={
                source: {"task": f"held_out/{source}"}
                for source in ("code", "prose", "math", "all")
            },
            everywhere={"stage": "quickstart", "metric": "bits_per_byte"},
            factor=1.0,
            digits=3,
            headline="R = 4",
        )
    ],
    "quickstart_search": [
        ResultTable(
            name="bits",
            title="held-out bits per byte",
            rows={
                f"{name} R={r}": {"stage": name, "reading": f"static:{r}"}
                for name in CANDIDATES
                for r in (1, round(CANDIDATES[name].steps.largest))
            },
            columns={task: {"task": f"held_out/{task}"} for task in ("code", "prose", "math")},
            everywhere={"metric": "bits_per_byte"},
            factor=1.0,
            digits=3,
        )
    ],
}


def quickstart() -> LoopTrainer.Config:
    """One looped layer of 0.3 M parameters on code, prose and mathematics; minutes on a CPU.

    It is the best candidate, on as many tokens as five minutes pay for. Only its last step has a
    loss: README.md measures the cost of an exit gate for a single layer.
    """
    return _config("d96_muon_last", "runs/quickstart", tokens=QUICK_TOKENS)


def quickstart_search() -> Recipe:
    """Shapes, depths, schedules and optimisers at the quick start's cost."""
    stages = [Stage(name=name, config=_config(name)) for name in CANDIDATES]
    for stage in stages:
        stage.config.held_out = HeldOutConfig(depths=[1, 2, 4], windows=128)
        stage.config.checkpoint.interval = 2000
    return Recipe(name="quickstart_search", stages=stages)


def _config(name: str, folder: str = "", tokens: int | None = None) -> LoopTrainer.Config:
    candidate = CANDIDATES[name]
    tokens = tokens or candidate.tokens
    config = LoopTrainer.Config(
        dump_folder=folder,
        total_tokens=tokens,
        model=OuroOptions(
            size="quickstart",
            n_layers=candidate.layers,
            dim=candidate.dim,
            hidden_dim=candidate.hidden_dim,
            exit_gate=candidate.exit_gate,
        ),
        dataloader=WindowLoader.Config(
            mixture=[f"{CORPUS}/code=0.4", f"{CORPUS}/prose=0.4", f"{CORPUS}/math=0.2"]
        ),
        learning_rate=Schedule.warmup_cosine(
            1e-2,
            start=1e-3,
            warmup_tokens=150_000,
            total_tokens=tokens,
            final=candidate.final_rate,
        ),
        entropy_weight=Schedule.constant(0.1),
        recurrence=RecurrenceConfig(steps=candidate.steps),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(BATCH_TOKENS)),
        held_out=HeldOutConfig(interval=600, depths=[1, 2, 4, 6], windows=16),
    )
    config.optimizer.name = candidate.optimizer
    config.training.seq_len = WINDOW_TOKENS
    config.training.local_batch_size = 4
    config.checkpoint.interval = 600
    config.metrics.log_freq = 10
    config.metrics.enable_tensorboard = True
    return config
