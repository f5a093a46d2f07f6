"""Settings that the runs of several studies share, and the rows and columns of their tables."""

from collections.abc import Iterable, Mapping
from typing import Any

from titan_loop.analysis.results import ResultTable, Where
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.loader import WindowLoader
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.models.family import ModelOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

CORPUS = "corpora/quickstart"
SOURCES = ("code", "prose", "math")


def run(
    model: ModelOptions,
    data: GlobalBatchLoader.Config,
    *,
    tokens: int,
    window: int,
    windows: int,
    rate: Schedule,
    steps: int | Schedule | RecurrenceConfig,
    save_every: int,
    at_once: int = 0,
    log_every: int = 10,
    optimizer: str = "adamw",
    max_norm: float | None = None,
    keep_latest: int | None = None,
    **settings: Any,
) -> LoopTrainer.Config:
    """Return a run whose batch has one size.

    Args:
        windows: Windows of a training step on all ranks.
        at_once: Windows of a rank at a time; 0 for all of a step.
        max_norm: Largest norm of the gradient; None for the trainer's.
        keep_latest: Number of newest checkpoints to keep; None for the trainer's.
    """
    if isinstance(steps, int):
        steps = Schedule.constant(steps)
    config = LoopTrainer.Config(
        total_tokens=tokens,
        model=model,
        dataloader=data,
        learning_rate=rate,
        recurrence=RecurrenceConfig(steps=steps) if isinstance(steps, Schedule) else steps,
        batch=BatchConfig(global_batch_tokens=Schedule.constant(windows * window)),
        **settings,
    )
    config.training.seq_len = window
    config.training.local_batch_size = at_once or windows
    config.checkpoint.interval = save_every
    config.metrics.log_freq = log_every
    config.optimizer.name = optimizer
    if max_norm is not None:
        config.training.max_norm = max_norm
    if keep_latest is not None:
        config.checkpoint.keep_latest_k = keep_latest
    return config


def recipe_of(name: str, configs: Mapping[str, LoopTrainer.Config]) -> Recipe:
    """Return a recipe of runs that start from initial weights, by the names of their stages."""
    return Recipe(
        name=name, stages=[Stage(name=arm, config=config) for arm, config in configs.items()]
    )


def cosine(rate: float, tokens: int, *, start: float = 0.0, warmup: int | None = None) -> Schedule:
    """Return a rate that falls to a tenth of its largest by half of a cosine.

    `warmup` is the number of tokens in which it rises; None for a twentieth of all.
    """
    return Schedule.warmup_cosine(
        rate,
        start=start,
        warmup_tokens=tokens // 20 if warmup is None else warmup,
        total_tokens=tokens,
        final=rate / 10,
    )


def text(corpus: str = CORPUS, **settings: Any) -> WindowLoader.Config:
    """Return the quick start's mixture, from its corpus or from one in other tokens."""
    return WindowLoader.Config(
        mixture=[f"{corpus}/code=0.4", f"{corpus}/prose=0.4", f"{corpus}/math=0.2"], **settings
    )


def at(stage: str, steps: int) -> Where:
    """Return the address of a stage that is read after so many recurrent steps."""
    return {"stage": stage, "reading": f"static:{steps}"}


def by_steps(steps: Iterable[int], label: str = "R = {}") -> dict[str, Where]:
    """Return a row or column for each number of recurrent steps."""
    return {label.format(each): {"reading": f"static:{each}"} for each in steps}


def by_source(sources: Iterable[str] = SOURCES) -> dict[str, Where]:
    """Return a row or column for each source of held-out text."""
    return {source: {"task": f"{HELD_OUT}/{source}"} for source in sources}


def bits_table(
    name: str,
    title: str,
    rows: Mapping[str, Where],
    columns: Mapping[str, Where],
    *,
    source: str = "",
    everywhere: Where | None = None,
    **settings: Any,
) -> ResultTable:
    """Return a table of held-out bits per byte, of one source or of columns with sources."""
    task = {"task": f"{HELD_OUT}/{source}"} if source else {}
    return ResultTable(
        name=name,
        title=title,
        rows=rows,
        columns=columns,
        everywhere={"metric": "bits_per_byte", **task, **(everywhere or {})},
        factor=1.0,
        digits=3,
        **settings,
    )
