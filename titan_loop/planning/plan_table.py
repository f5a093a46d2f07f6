"""The needs and rehearsals of a recipe's stages, as lines of text."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from titan_loop.distributed.activation_checkpointing import checkpointing_of
from titan_loop.models.units import UnitSize
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.measured_step import MeasuredStep
from titan_loop.planning.rehearsal import Rehearsed, gpu_peak_bytes
from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.planning.step_meter import Moved
from titan_loop.tables import columns

_COLUMNS = 7  # stages beside each other
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}

T = TypeVar("T")


def plan_lines(recipe: str, gpu: str, cluster: Cluster, needs: Sequence[StageNeeds]) -> list[str]:
    """Return a heading, a table with one column per stage, and the total."""
    dtypes = _each(needs, lambda need: _DTYPES[need.config.training.mixed_precision_param])
    optimizers = _each(needs, _optimizer)
    peaks = _each(needs, lambda need: f"{need.gpu_flops / 1e12:g}")
    lines = [
        f"{recipe} on {cluster.ranks:,} GPUs ({cluster.nodes} nodes × {cluster.gpus_per_node} "
        f"{gpu}), {dtypes} compute, fp32 masters and {optimizers}, {cluster.mfu:.0%} MFU of "
        f"{peaks} TFLOP/s assumed"
    ]
    for some in _side_by_side(needs):
        lines += ["", *_needs_table(some, cluster)]
    total = sum(need.gpu_days for need in needs)
    return [
        *lines,
        f"\nall stages: {sum(need.tokens for need in needs):,} tokens, {total:,.1f} GPU-days, "
        f"{total / cluster.ranks:,.2f} days",
    ]


def rehearsal_lines(found: Sequence[Rehearsed], cluster: Cluster) -> list[str]:
    """Return a table with a column for each stage, and the faults of stages not assembled."""
    assembled = [one for one in found if one.measured is not None]
    lines = [f"rehearsed as rank 0 of {cluster.ranks:,}, fake tensors on a fake process group"]
    for some in _side_by_side(assembled):
        lines += _rehearsal_table(some)
    if any(one.like.startswith("as ") for one in found):
        lines.append("as STAGE: differs from it in data, seed, rates, length or other values alone")
    if any(one.needs.config.compile.graphs for one in assembled):
        lines.append("compile.graphs: what CUDA graphs reserve comes on top of the peak")
    lines += [f"{one.needs.name}: not assembled: {one.fault}" for one in found if one.fault]
    return lines


def _side_by_side(stages: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(stages), _COLUMNS):
        yield stages[start : start + _COLUMNS]


def _needs_table(needs: Sequence[StageNeeds], cluster: Cluster) -> list[str]:
    rows: list[list[str]] = []

    def row(title: str, cell: Callable[[StageNeeds], str]) -> None:
        rows.append([title, *map(cell, needs)])

    row("stage", lambda n: n.name)
    row("parameters", lambda n: _parameters(n.units))
    for name in dict.fromkeys(unit.unit.name for need in needs for unit in need.units):
        row(f"  {name}", lambda n, name=name: _parameters(n.units, name))
    if any(need.model.idle_parameters() for need in needs):
        row("active parameters", lambda n: _parameters(n.units, less=n.model.idle_parameters()))
    row("recurrent steps R, mean", lambda n: f"{n.mean_recurrent_steps:g}")
    row("GFLOP per token", lambda n: f"{n.flops_per_token.total / 1e9:.4g}")
    for part in needs[0].flops_per_token._fields:
        row(
            f"  {'R visits, ' if part == 'matrices' else ''}{part}",
            lambda n, part=part: f"{getattr(n.flops_per_token, part) / 1e9:.4g}",
        )
    row("tokens", lambda n: f"{n.tokens:.4g}")
    row("data", lambda n: n.data)
    row("training steps", lambda n: f"{n.steps:,}")
    row("window", lambda n: f"{n.config.training.seq_len:,}")
    row("global batch, windows", lambda n: _range(*n.batch_windows))
    row("data-parallel ranks", lambda n: f"{n.data_parallel_ranks:,}")
    row("context parallel", lambda n: str(n.config.parallelism.context_parallel_degree))
    row("tensor parallel", lambda n: str(n.config.parallelism.tensor_parallel_degree))
    row("local batch, windows", lambda n: str(n.config.training.local_batch_size))
    row("accumulation", lambda n: _range(*n.accumulation))
    row("checkpointing", lambda n: checkpointing_of(n.config.activation_checkpoint))
    row("FSDP policy", lambda n: n.policy)
    row("GiB of a rank, states", lambda n: _gib(n.states.total))
    row("  parameters, sharded", lambda n: _gib(n.states.parameters))
    row("  gradients, sharded", lambda n: _gib(n.states.gradients))
    row("  optimiser", lambda n: _gib(n.states.optimizer))
    row("GPU-days", lambda n: f"{n.gpu_days:,.1f}")
    row("days", lambda n: f"{n.gpu_days / cluster.ranks:,.2f}")
    return columns(rows)


def _rehearsal_table(found: Sequence[Rehearsed]) -> list[str]:
    stages = [
        (one, one.measured, one.measured.moved_in(one.needs.accumulation[1]))
        for one in found
        if one.measured is not None
    ]
    rows: list[list[str]] = []

    def row(title: str, cell: Callable[[Rehearsed, MeasuredStep, dict[str, Moved]], str]) -> None:
        rows.append([title, *(cell(*stage) for stage in stages)])

    row("stage", lambda one, *_: one.needs.name)
    row("", lambda one, *_: one.like or "assembled")
    row("micro-batches", lambda one, m, _: f"{m.micro_batches} of {one.needs.accumulation[1]:g}")
    row("GiB of a GPU, peak", lambda one, m, _: _gib(gpu_peak_bytes(one.needs, m)))
    row("GiB of a rank in a checkpoint", lambda _, m, __: _gib(m.checkpoint_bytes))
    row("collectives in a step", lambda *s: f"{sum(kind.count for kind in s[2].values()):,}")
    row("GiB received in a step", lambda *s: _gib(sum(k.received_bytes for k in s[2].values())))
    for kind in sorted({kind for _, _, moved in stages for kind in moved}):
        row(f"  {kind}", lambda *s, kind=kind: _gib(s[2].get(kind, Moved()).received_bytes))
    return columns(rows)


def _each(needs: Sequence[StageNeeds], cell: Callable[[StageNeeds], str]) -> str:
    return " or ".join(dict.fromkeys(map(cell, needs)))


def _parameters(units: Sequence[UnitSize], name: str | None = None, less: int = 0) -> str:
    return f"{sum(unit.parameters() for unit in units if name in (None, unit.unit.name)) - less:,}"


def _optimizer(need: StageNeeds) -> str:
    name = need.config.optimizers()[need.config.optimizer.name].title
    return f"{name} with an average" if need.config.ema.decay > 0 else name


def _range(smallest: float, largest: float) -> str:
    texts = [
        f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" for value in (smallest, largest)
    ]
    return texts[0] if smallest == largest else "–".join(texts)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}"
