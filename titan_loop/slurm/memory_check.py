"""A check that a recipe's stages fit the GPUs that a job asks for.

The need is a step's peak if `titan-loop plan` has measured it, else weights, gradients and moments.
"""

from collections.abc import Sequence

import titan_loop.compat as compat  # before any torchtitan module

from titan_loop.distributed.devices import DEVICES, USABLE_SHARE
from titan_loop.errors import UserError
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.rehearsal import known_peak_bytes
from titan_loop.planning.stage_needs import stage_needs
from titan_loop.recipes.recipe import Recipe, Stage


def memory_remarks(
    recipe: Recipe,
    stages: Sequence[Stage],
    *,
    name: str,
    nodes: int,
    gpus_per_node: int,
    gpu: str,
) -> list[str]:
    """Return lines about stages that barely fit or were not measured, or about an unknown GPU.

    `name` is the recipe's as `titan-loop plan` takes it.

    Raises `UserError` if a stage needs more than the whole memory of a GPU.
    """
    kinds = [name for name in DEVICES if gpu and name.startswith(gpu.lower())]
    if not kinds:
        why = f"the GPU {gpu} is unknown" if gpu else "no kind of GPU is named"
        return [f"memory was not checked: {why}; look at titan-loop plan {name} --gpu NAME"]
    device = max((DEVICES[name] for name in kinds), key=lambda known: known.memory_bytes)
    # The MFU does not matter: times are not used.
    cluster = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=device, mfu=1.0)
    found: list[str] = []
    unmeasured: list[str] = []
    for stage in stages:
        with compat.assuming("cuda"):
            needs = stage_needs(stage.name, stage.config, cluster, recipe=recipe)
            peak = known_peak_bytes(needs, cluster)
        need = peak
        if need is None:
            need = 0.0 if stage.config.training.enable_cpu_offload else needs.states.total
        if need <= USABLE_SHARE * device.memory_bytes:
            unmeasured += [stage.name] * (peak is None)
            continue
        line = (
            f"stage {stage.name} needs {need / 2**30:.0f} GiB of the "
            f"{device.memory_bytes / 2**30:.0f} GiB of a {gpu}; titan-loop plan "
            f"{name} --stage {stage.name} --nodes {nodes} --gpus-per-node {gpus_per_node} "
            "suggests a fix"
        )
        if need > device.memory_bytes:
            raise UserError(line)
        found.append(line)
    if unmeasured:
        found.append(
            f"peak memory is unknown for {', '.join(unmeasured)}; titan-loop plan {name} "
            f"--nodes {nodes} --gpus-per-node {gpus_per_node} measures it"
        )
    return found
