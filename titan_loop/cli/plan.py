"""`titan-loop plan RECIPE [--nodes N …]`: what every stage would need on GPUs that are not here."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK, UserError
from titan_loop.recipes.registry import load_recipe

if TYPE_CHECKING:
    from titan_loop.planning.stage_needs import Cluster, StageNeeds

USAGE = """usage: titan-loop plan RECIPE [--nodes N] [--gpus-per-node N] [--gpu NAME] [--mfu SHARE]
                       [--stage NAME] [--FLAG VALUE ...] [--stages.NAME.FLAG VALUE ...]
                       [activation-checkpoint:KIND]

Prints for every stage of RECIPE parameters, FLOPs, steps and batches, memory of a GPU by part,
communication of a step and GPU-days, without a GPU and without the data. Ends with code 2 if a
stage cannot run so, and says how it could. Flags after the cluster's are those of `train`.

  --nodes N          hosts (1)
  --gpus-per-node N  GPUs of a host (8)
  --gpu NAME         {gpus} (h100-80gb)
  --mfu SHARE        assumed model FLOPs over peak FLOPs, for the GPU-days (0.4)
  --stage NAME       one stage alone

examples:
  titan-loop plan ouro_1_4b --nodes 64
  titan-loop plan ouro_1_4b --stage 1b --nodes 8 --gpu h200-141gb --fsdp.policy per_visit"""

_COLUMNS = 7  # stages beside each other
_PRECISION_FLAG = "--training.mixed-precision-param"


def run(arguments: Sequence[str]) -> int:
    """Print the tables.

    Raises:
        UserError: If a stage cannot run on that cluster, after the table was printed.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        from titan_loop.distributed.devices import DEVICES

        print(USAGE.format(gpus=", ".join(DEVICES)))
        return EXIT_OK
    name, *flags = arguments
    if name.startswith("-"):
        raise UserError(f"plan: the recipe comes first, before {name}")
    recipe = load_recipe(name)

    from titan_loop.cli.overrides import take_flag
    from titan_loop.cli.stage_flags import apply_to_stages
    from titan_loop.planning.stage_needs import stage_needs

    flags, given = _take_cluster_flags(flags)
    flags, only = take_flag(flags, "--stage")
    cluster = _cluster(given, full_precision=_asks_for_fp32(flags))
    stages = recipe.stages if only is None else [recipe.stage(only)]
    apply_to_stages(recipe, flags, f"titan-loop plan {name}", only=only)
    needs = []
    for stage in stages:
        try:
            trained = stage.parent is not None
            needs.append(stage_needs(stage.name, stage.config, cluster, starts_trained=trained))
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
    _print(name, given, cluster, needs)
    refused = [f"{need.name}: {refusal}" for need in needs for refusal in need.refusals]
    for line in refused:
        print(f"refused: {line}")
    if refused:
        stages_refused = sum(bool(need.refusals) for need in needs)
        raise UserError(
            f"plan: {stages_refused} of {len(needs)} stages cannot run so; {refused[0]}"
        )
    return EXIT_OK


def _take_cluster_flags(flags: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    from titan_loop.cli.overrides import take_flag

    parser = Parser("plan", "The cluster.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--mfu", type=float, default=0.4)
    rest, cluster = list(flags), []
    for flag in ("--nodes", "--gpus-per-node", "--gpu", "--mfu"):
        rest, value = take_flag(rest, flag)
        if value is not None:
            cluster += [flag, value]
    return rest, parser.parse(cluster)


def _asks_for_fp32(flags: Sequence[str]) -> bool:
    """Return whether all stages compute in fp32; the config here may have a CPU's default."""
    from titan_loop.cli.overrides import take_flag

    for name in (flag.partition("=")[0].replace("_", "-") for flag in flags):
        if name.startswith("--stages.") and name.endswith(_PRECISION_FLAG.removeprefix("--")):
            raise UserError(
                f"{name}: plan counts all stages in one precision; use {_PRECISION_FLAG}, and "
                "--stage NAME for one of them"
            )
    return take_flag(flags, _PRECISION_FLAG)[1] == "float32"


def _cluster(given: argparse.Namespace, *, full_precision: bool) -> "Cluster":
    from titan_loop.distributed.devices import get_device
    from titan_loop.planning.stage_needs import Cluster

    cluster = Cluster(
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        gpu=get_device(given.gpu),
        mfu=given.mfu,
        compute_bytes=4 if full_precision else 2,
    )
    cluster.check()
    return cluster


def _print(
    recipe: str, given: argparse.Namespace, cluster: "Cluster", needs: Sequence["StageNeeds"]
) -> None:
    dtype = "bf16" if cluster.compute_bytes == 2 else "fp32"
    print(
        f"{recipe} on {cluster.ranks:,} GPUs ({cluster.nodes} nodes × {cluster.gpus_per_node} "
        f"{given.gpu}), {dtype} compute, fp32 masters and AdamW, {cluster.mfu:.0%} MFU of "
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]))


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
