"""Settings that the runs of several studies share, and the rows and columns of their tables."""

from collections.abc import Iterable, Mapping
from typing import Any

from titan_loop.analysis.results import ResultTable, Where
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.loader import WindowLoader
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.models.family import ModelOptions
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
    **settings: Any,
) -> LoopTrainer.Config:
    """Return a run whose batch has one size.

    Args:
        windows: Windows of a training step on all ranks.
        at_once: Windows of a rank at a time; 0 for all of a step.
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
    return config


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
