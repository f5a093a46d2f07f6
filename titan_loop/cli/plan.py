"""`titan-loop plan RECIPE [--nodes N …]`: estimate what every stage needs, without a GPU."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from titan_loop.cli.arguments import command, recipe_first
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError

if TYPE_CHECKING:
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.stage_needs import StageNeeds
    from titan_loop.recipes.recipe import Recipe

_PRECISION_FLAG = "--training.mixed-precision-param"


def _known_gpus(default: str) -> str:
    from titan_loop.distributed.devices import DEVICES

    return f"(one of {', '.join(DEVICES)}; default: {default})"


@recipe_first
def plan(
    recipe: str,
    flags: Sequence[str],
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: Annotated[str, tyro.conf.arg(help_behavior_hint=_known_gpus)] = "h100-80gb",
    mfu: float = 0.4,
    stage: str | None = None,
    scaling_fit: Path | None = None,
    rehearse: bool = False,
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
        scaling_fit: The scaling.json of titan-loop scaling; adds what the recurrent steps are worth
            in nats and GPU-days against the same model without loops and against one unrolled.
        rehearse: Assemble every stage as one rank of the cluster, with the real trainer on fake
            tensors: a training step, a held-out pass, a checkpoint's plan. Takes minutes.
    """
    resolved = _resolved(recipe, flags, stage, for_cuda=rehearse)

    from titan_loop.distributed.devices import get_device
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.loop_worth import read_fit, worth_lines
    from titan_loop.planning.plan_table import plan_lines
    from titan_loop.planning.stage_needs import recipe_needs

    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=get_device(gpu),
        mfu=mfu,
        compute_bytes=4 if _asks_for_fp32(flags) else 2,
    )
    cluster.check()
    worth = None if scaling_fit is None else read_fit(scaling_fit)
    needs = recipe_needs(resolved, cluster, only=stage)
    print("\n".join(plan_lines(recipe, gpu, cluster, needs)))
    if worth is not None:
        print("\n".join(worth_lines(worth, needs, cluster)))
    refused = [f"{need.name}: {refusal}" for need in needs for refusal in need.refusals]
    for line in refused:
        print(f"refused: {line}")
    if refused:
        stages_refused = sum(bool(need.refusals) for need in needs)
        raise UserError(f"plan: {stages_refused} of {len(needs)} stages do not fit; {refused[0]}")
    if rehearse:
        _rehearse(resolved, cluster, needs)


def _resolved(recipe: str, flags: Sequence[str], stage: str | None, *, for_cuda: bool) -> "Recipe":
    """Return the recipe with the defaults of this machine, or of one with a GPU."""
    if not for_cuda:
        return resolve_recipe(recipe, flags, verb="plan", only=stage)
    import titan_loop.compat as compat

    with compat.assuming("cuda"):
        return resolve_recipe(recipe, flags, verb="plan", only=stage)


def _rehearse(recipe: "Recipe", cluster: "Cluster", planned: "Sequence[StageNeeds]") -> None:
    import titan_loop.compat as compat

    from titan_loop.planning.rehearsal import Rehearsed, rehearsal_lines, rehearse

    compat.quiet_upstream()
    found: list[Rehearsed] = []
    for one in rehearse(recipe, cluster, planned):
        found.append(one)
        said = one.fault or (f"as {one.like}" if one.like else "assembled")
        print(f"titan-loop: {one.needs.name}: {said}, {one.cpu_seconds:.0f} s", file=sys.stderr)
    print("\n" + "\n".join(rehearsal_lines(found, cluster)))
    faults = [f"{one.needs.name}: {one.fault}" for one in found if one.fault]
    if faults:
        raise UserError(
            f"plan: {len(faults)} of {len(found)} stages were not assembled; {faults[0]}"
        )


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


run = command("plan", plan)
