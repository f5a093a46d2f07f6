"""The needs of a recipe's stages, as lines of text."""

from collections.abc import Callable, Sequence

from titan_loop.distributed.step_shape import OptimizerStates
from titan_loop.models.units import LAYERS, UnitSize
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.tables import columns

_COLUMNS = 7  # stages beside each other


def plan_lines(recipe: str, gpu: str, cluster: Cluster, needs: Sequence[StageNeeds]) -> list[str]:
    """Return a heading, a table with one column per stage, and the total.

    Args:
        recipe: Name of the recipe.
        gpu: Name of the GPU model.
        cluster: Cluster that was planned for.
        needs: Needs of each stage.
    """
    dtype = "bf16" if cluster.compute_bytes == 2 else "fp32"
    optimizers = " or ".join(dict.fromkeys(_optimizer(need.shape.states) for need in needs))
    lines = [
        f"{recipe} on {cluster.ranks:,} GPUs ({cluster.nodes} nodes × {cluster.gpus_per_node} "
        f"{gpu}), {dtype} compute, fp32 masters and {optimizers}, {cluster.mfu:.0%} MFU of "
        f"{cluster.peak_flops / 1e12:g} TFLOP/s assumed"
    ]
    for start in range(0, len(needs), _COLUMNS):
        lines += ["", *_columns(needs[start : start + _COLUMNS], cluster)]
    total = sum(need.gpu_days for need in needs)
    return [
        *lines,
        "* with the stage's own checkpointing",
        f"\nall stages: {sum(need.tokens for need in needs):,} tokens, {total:,.1f} GPU-days, "
        f"{total / cluster.ranks:,.2f} days",
    ]


def _columns(needs: Sequence[StageNeeds], cluster: Cluster) -> list[str]:
    rows: list[list[str]] = []

    def row(title: str, cell: Callable[[StageNeeds], str]) -> None:
        rows.append([title, *map(cell, needs)])

    row("stage", lambda n: n.name)
    row("parameters", lambda n: _parameters(n.units))
    row("  of the layers", lambda n: _parameters(n.units, LAYERS))
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
    row("window", lambda n: f"{n.shape.seq_len:,}")
    row("global batch, windows", lambda n: _range(*n.batch_windows))
    row("data-parallel ranks", lambda n: f"{n.data_parallel_ranks:,}")
    row("context × tensor parallel", _model_parallel)
    row("local batch, windows", lambda n: str(n.shape.windows))
    row("accumulation", lambda n: _range(*n.accumulation))
    row("checkpointing", lambda n: n.shape.checkpointing)
    row("FSDP policy", lambda n: n.policy)
    row("GiB of a GPU, estimated peak", lambda n: _gib(n.memory.peak))
    row("  parameters, sharded", lambda n: _gib(n.memory.parameters))
    row("  gradients, sharded", lambda n: _gib(n.memory.gradients))
    row("  optimiser", lambda n: _gib(n.memory.optimizer))
    row("  parameters kept gathered", lambda n: _gib(n.memory.gathered))
    row("  gradients, unsharded", lambda n: _gib(n.memory.unsharded_gradients))
    row("  readout chunk", lambda n: _gib(n.memory.readout_chunk))
    row("  head, state gradients", lambda n: _gib(n.memory.readout - n.memory.readout_chunk))
    row("  being recomputed", lambda n: _gib(n.memory.recomputed))
    row("  Muon's update", lambda n: _gib(n.memory.update))
    for policy in needs[0].activations:
        row(f"  activations, {policy}", lambda n, policy=policy: _activations(n, policy))
    row("GiB of the host, offloaded", lambda n: _gib(n.memory.offloaded))
    row("collectives in a step", lambda n: f"{sum(t.count for t in n.traffic):,}")
    row("GiB received in a step", lambda n: _gib(sum(t.received_bytes for t in n.traffic)))
    for what in dict.fromkeys(entry.what for need in needs for entry in need.traffic):
        row(f"  {what}", lambda n, what=what: _traffic(n, what))
    row("GPU-days", lambda n: f"{n.gpu_days:,.1f}")
    row("days", lambda n: f"{n.gpu_days / cluster.ranks:,.2f}")
    return columns(rows)


def _parameters(units: Sequence[UnitSize], name: str | None = None) -> str:
    return f"{sum(unit.parameters() for unit in units if name in (None, unit.unit.name)):,}"


def _optimizer(states: OptimizerStates) -> str:
    name = "Muon" if states.muon_bytes else "AdamW"
    return f"{name} with an average" if states.averaged else name


def _model_parallel(need: StageNeeds) -> str:
    return f"{need.shape.context_parallel_degree} × {need.shape.tensor_parallel_degree}"


def _range(smallest: float, largest: float) -> str:
    texts = [
        f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" for value in (smallest, largest)
    ]
    return texts[0] if smallest == largest else "–".join(texts)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}"


def _activations(need: StageNeeds, policy: str) -> str:
    mark = "*" if policy == need.shape.checkpointing else " "
    return _gib(need.activations[policy]) + mark


def _traffic(need: StageNeeds, what: str) -> str:
    received = sum(entry.received_bytes for entry in need.traffic if entry.what == what)
    return _gib(received) if received else "-"
