"""`titan-loop plan RECIPE [--nodes N …]`: what every stage would need on GPUs that are not here."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from titan_loop.cli.arguments import command, recipe_first
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError
from titan_loop.tables import columns

if TYPE_CHECKING:
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.stage_needs import StageNeeds

_COLUMNS = 7  # stages beside each other
_PRECISION_FLAG = "--training.mixed-precision-param"


def _known_gpus(default: str) -> str:
    from titan_loop.distributed.devices import DEVICES

    return f"(one of {', '.join(DEVICES)}; default: {default})"


@recipe_first
def plan(
    recipe: Positional[str],
    flags: Sequence[str],
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: Annotated[str, tyro.conf.arg(help_behavior_hint=_known_gpus)] = "h100-80gb",
    mfu: float = 0.4,
    stage: str | None = None,
) -> None:
    """Print what every stage of a recipe needs on a cluster, without a GPU and without the data.

    For every stage: parameters, FLOPs, steps and batches, memory of a GPU by part, communication of
    a step and GPU-days. Ends with code 2 if a stage does not fit, and suggests a fix. All other
    flags are those of titan-loop train.

    For example:
      titan-loop plan ouro_1_4b --nodes 64
      titan-loop plan ouro_1_4b --stage 1b --nodes 8 --gpu h200-141gb --fsdp.policy per_visit

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        flags: Flags of the recipe.
        nodes: Number of hosts.
        gpus_per_node: Number of GPUs per host.
        gpu: GPU model.
        mfu: Assumed model FLOPs over peak FLOPs, for the GPU-days.
        stage: Plan this stage alone.
    """
    resolved = resolve_recipe(recipe, flags, verb="plan", only=stage)

    from titan_loop.distributed.devices import get_device
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.stage_needs import recipe_needs

    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=get_device(gpu),
        mfu=mfu,
        compute_bytes=4 if _asks_for_fp32(flags) else 2,
    )
    cluster.check()
    needs = recipe_needs(resolved, cluster, only=stage)
    _print(recipe, gpu, cluster, needs)
    refused = [f"{need.name}: {refusal}" for need in needs for refusal in need.refusals]
    for line in refused:
        print(f"refused: {line}")
    if refused:
        stages_refused = sum(bool(need.refusals) for need in needs)
        raise UserError(f"plan: {stages_refused} of {len(needs)} stages do not fit; {refused[0]}")


def _asks_for_fp32(flags: Sequence[str]) -> bool:
    """Return whether all stages compute in fp32; the config here may have a CPU's default."""
    words = [word.replace("_", "-") for flag in flags for word in flag.split("=", 1)]
    for word in words:
        if word.startswith("--stages.") and word.endswith(_PRECISION_FLAG.removeprefix("--")):
            raise UserError(
                f"{word}: plan counts all stages in one precision; use {_PRECISION_FLAG}, and "
                "--stage NAME for one of them"
            )
    values = [value for flag, value in itertools.pairwise(words) if flag == _PRECISION_FLAG]
    return values[-1:] == ["float32"]


def _print(recipe: str, gpu: str, cluster: "Cluster", needs: Sequence["StageNeeds"]) -> None:
    dtype = "bf16" if cluster.compute_bytes == 2 else "fp32"
    print(
        f"{recipe} on {cluster.ranks:,} GPUs ({cluster.nodes} nodes × {cluster.gpus_per_node} "
        f"{gpu}), {dtype} compute, fp32 masters and AdamW, {cluster.mfu:.0%} MFU of "
        f"{cluster.peak_flops / 1e12:g} TFLOP/s assumed"
    )
    for start in range(0, len(needs), _COLUMNS):
        print()
        _print_columns(needs[start : start + _COLUMNS], cluster)
    total = sum(need.gpu_days for need in needs)
    print(
        f"\nall stages: {sum(need.tokens for need in needs):,} tokens, {total:,.1f} GPU-days, "
        f"{total / cluster.ranks:,.2f} days"
    )


def _print_columns(needs: Sequence["StageNeeds"], cluster: "Cluster") -> None:
    rows: list[list[str]] = []

    def row(title: str, cell: Callable[["StageNeeds"], str]) -> None:
        rows.append([title, *map(cell, needs)])

    row("stage", lambda n: n.name)
    row("parameters", lambda n: f"{n.units.total:,}")
    row("  of the layers", lambda n: f"{n.units.layer * n.units.n_layers:,}")
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
    for policy in needs[0].activations:
        row(f"  activations, {policy}", lambda n, policy=policy: _activations(n, policy))
    row("GiB of the host, offloaded", lambda n: _gib(n.memory.offloaded))
    row("collectives in a step", lambda n: f"{sum(t.count for t in n.traffic):,}")
    row("GiB received in a step", lambda n: _gib(sum(t.received_bytes for t in n.traffic)))
    for what in dict.fromkeys(entry.what for need in needs for entry in need.traffic):
        row(f"  {what}", lambda n, what=what: _traffic(n, what))
    row("GPU-days", lambda n: f"{n.gpu_days:,.1f}")
    row("days", lambda n: f"{n.gpu_days / cluster.ranks:,.2f}")
    print("\n".join(columns(rows)))


def _model_parallel(need: "StageNeeds") -> str:
    return f"{need.shape.context_parallel_degree} × {need.shape.tensor_parallel_degree}"


def _range(smallest: float, largest: float) -> str:
    texts = [
        f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" for value in (smallest, largest)
    ]
    return texts[0] if smallest == largest else "–".join(texts)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}"


def _activations(need: "StageNeeds", policy: str) -> str:
    mark = "*" if policy == need.shape.checkpointing else " "
    return _gib(need.activations[policy]) + mark


def _traffic(need: "StageNeeds", what: str) -> str:
    received = sum(entry.received_bytes for entry in need.traffic if entry.what == what)
    return _gib(received) if received else "-"


run = command("plan", plan)
