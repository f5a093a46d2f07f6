"""`titan-loop plan RECIPE`: needs of a recipe's stages on a cluster."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_loop.cli.arguments import command
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError

if TYPE_CHECKING:
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.rehearsal import Rehearsed
    from titan_loop.planning.stage_needs import StageNeeds


def plan(
    recipe: str,
    flags: Sequence[str],
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "h100-80gb",
    mfu: float = 0.4,
    stage: str | None = None,
    no_memory: bool = False,
    rehearse: bool = False,
) -> None:
    """Print the needs of every stage of a recipe on a cluster, without a GPU and without the data.

    For every stage: parameters, FLOPs, steps, batches, bytes of weights, gradients and moments, and
    GPU-days. Then the real trainer runs every stage on fake tensors as one rank of the cluster, to
    measure the peak memory of a GPU and the communication of a step. That takes up to half a minute
    per stage, and is repeated only when the stage's assembly or the software changes. Exits with
    code 2 if a stage does not fit, and suggests a fix. Other flags are flags of titan-loop train.

    For example:
      titan-loop plan ouro_1_4b --nodes 64
      titan-loop plan ouro_1_4b --stage 1b --nodes 8 --gpu h200-141gb --fsdp.policy per_visit

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        nodes: Number of hosts.
        gpus_per_node: Number of GPUs per host.
        gpu: GPU model; a wrong one is answered with the known ones.
        mfu: Assumed share of a GPU's peak FLOPs, for the GPU-days.
        stage: Plan this stage alone.
        no_memory: Print the arithmetic alone, without measuring memory and communication.
        rehearse: Assemble every stage anew, and exit with code 2 if one cannot be assembled.
    """
    import titan_loop.compat as compat

    with compat.assuming("cuda"):
        resolved = resolve_recipe(recipe, flags, verb="plan", only=stage)

    from titan_loop.distributed.devices import get_device
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.plan_table import plan_lines
    from titan_loop.planning.stage_needs import recipe_needs

    cluster = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=get_device(gpu), mfu=mfu)
    cluster.check()
    needs = recipe_needs(resolved, cluster, only=stage)
    print("\n".join(plan_lines(recipe, gpu, cluster, needs)))
    _refuse([(need.name, refusal) for need in needs for refusal in need.refusals], len(needs))
    if rehearse or not no_memory:
        _rehearse(cluster, needs, anew=rehearse)


def _rehearse(cluster: "Cluster", planned: "Sequence[StageNeeds]", *, anew: bool) -> None:
    import titan_loop.compat as compat

    from titan_loop.planning.plan_table import rehearsal_lines
    from titan_loop.planning.rehearsal import gpu_peak_bytes, rehearse
    from titan_loop.planning.stage_needs import memory_refusal

    compat.quiet_upstream()
    found: list[Rehearsed] = []
    for one in rehearse(planned, cluster, anew=anew):
        found.append(one)
        if not one.like:
            print(f"titan-loop: {one.needs.name}: {one.fault or 'assembled'}", file=sys.stderr)
    print("\n" + "\n".join(rehearsal_lines(found, cluster)))
    peaks = [(one.needs, gpu_peak_bytes(one.needs, one.measured)) for one in found if one.measured]
    reasons = [(need.name, memory_refusal(need, peak, cluster.gpu)) for need, peak in peaks]
    _refuse([(name, reason) for name, reason in reasons if reason], len(planned))
    faults = [f"{one.needs.name}: {one.fault}" for one in found if one.fault]
    if anew and faults:
        raise UserError(
            f"plan: {len(faults)} of {len(found)} stages were not assembled; {faults[0]}"
        )


def _refuse(refused: Sequence[tuple[str, str]], stages: int) -> None:
    for name, refusal in refused:
        print(f"refused: {name}: {refusal}")
    if refused:
        names = {name for name, _ in refused}
        name, refusal = refused[0]
        raise UserError(f"plan: {len(names)} of {stages} stages do not fit; {name}: {refusal}")


run = command("plan")(plan)
