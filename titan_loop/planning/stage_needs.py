"""The needs of a stage on a cluster that is not there: memory, FLOPs, communication, GPU-days.

    config ─► architecture, schedules ─┬─► steps, batch, accumulation ─┐
                                       ├─► memory of a GPU by part ────┼─► table, refusals
    cluster ─► ranks, GPU ─────────────┴─► collectives, GPU-days ──────┘

Pure arithmetic: no process group, no device, no parameter. Memory is the estimate of
`titan_loop/distributed/memory.py`, communication the count of `communication.py`; GPU-days follow
from the model FLOPs (recomputation does not count) and a utilisation that is assumed, not measured.
"""

import math
from dataclasses import dataclass, replace

import titan_loop.compat as compat  # before any torchtitan module

from titan_loop.distributed.activation_checkpointing import CHECKPOINTING, Checkpointing
from titan_loop.distributed.communication import Traffic, step_traffic
from titan_loop.distributed.devices import Device
from titan_loop.distributed.memory import (
    USABLE_SHARE,
    StepMemory,
    estimate_memory,
    unit_sizes,
)
from titan_loop.distributed.step_shape import StepShape, step_shape
from titan_loop.errors import UserError, raise_first
from titan_loop.evaluation.suites import suite_refusals
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.flops import Flops
from titan_loop.models.units import UnitSize
from titan_loop.planning.cluster import Cluster
from titan_loop.recipes.preflight import carry_refusals, repetition_refusals
from titan_loop.recipes.recipe import Recipe
from titan_loop.training.batch_schedule import batch_sizes, plan_steps
from titan_loop.training.chosen_model import are_prepared, stage_architecture
from titan_loop.training.flop_budget import mean_flops
from titan_loop.training.layout_preflight import batch_refusals, layout_refusals
from titan_loop.training.preflight import model_refusals, setting_refusals, value_refusals
from titan_loop.training.recurrence import depths_over, most_recurrent_steps
from titan_loop.training.trainer import LoopTrainer

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """One stage on a cluster; `refusals` says why it cannot run there.

    Attributes:
        name: Name of the stage.
        units: FSDP units and their parameters.
        flops_per_token: Forward and backward FLOPs at the mean R.
        flops_at_one: The same at R = 1.
        mean_recurrent_steps: Mean R over the stage's tokens.
        shape: Work of one rank in one micro-batch, at the largest R.
        tokens: Tokens of the whole stage.
        steps: Number of training steps.
        batch_windows: Smallest and largest global batch, in windows.
        data_parallel_ranks: Number of ranks that read different windows.
        policy: FSDP policy, per_visit or per_step, with `auto` decided.
        memory: Bytes of one GPU under the config's checkpointing policy.
        activations: Bytes kept for the backward pass under every policy.
        traffic: Collectives of one rank in a step with the largest batch.
        gpu_days: GPU-days of the whole cluster.
        data: Whether the stage's data are here and last.
        refusals: Reasons why the stage cannot run, each with a fix.
    """

    name: str
    units: list[UnitSize]
    flops_per_token: Flops
    flops_at_one: Flops
    mean_recurrent_steps: float
    shape: StepShape
    tokens: int
    steps: int
    batch_windows: tuple[int, int]
    data_parallel_ranks: int
    policy: str
    memory: StepMemory
    activations: dict[str, float]
    traffic: list[Traffic]
    gpu_days: float
    data: str
    refusals: list[str]

    @property
    def accumulation(self) -> tuple[float, float]:
        """Micro-batches of a rank in the smallest and the largest batch; whole unless refused."""
        per_pass = self.data_parallel_ranks * self.shape.windows
        smallest, largest = self.batch_windows
        return smallest / per_pass, largest / per_pass


def recipe_needs(recipe: Recipe, cluster: Cluster, *, only: str | None = None) -> list[StageNeeds]:
    """Compute what every stage of a recipe needs.

    Args:
        recipe: Stages, whose data need not be there.
        cluster: What they are to run on.
        only: Name of one stage to plan alone.

    Raises:
        UserError: As `stage_needs`, with the name of the stage.
    """
    needs: list[StageNeeds] = []
    for stage in recipe.stages if only is None else [recipe.stage(only)]:
        try:
            needs.append(stage_needs(stage.name, stage.config, cluster, recipe=recipe))
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
    return needs


def stage_needs(
    name: str, config: LoopTrainer.Config, cluster: Cluster, *, recipe: Recipe | None = None
) -> StageNeeds:
    """Compute what one stage needs.

    Args:
        name: Name of the stage.
        config: Config of its run, not resolved: the data need not be there.
        cluster: What it is to run on.
        recipe: The recipe of the stage, to ask what it can take over from its parent; None for a
            run alone.

    Raises:
        UserError: A value, the architecture or a schedule is wrong by itself, on any cluster.
    """
    raise_first(value_refusals(config))
    stage = None if recipe is None else recipe.stage(name)
    parent = recipe.stage(stage.parent) if recipe and stage and stage.parent else None
    data, refusals = _data(config)
    if data == "enough" and recipe and stage and len(recipe.stages) > 1:
        refusals += map(str, repetition_refusals(stage))
    trained = parent is not None or bool(config.checkpoint.carry.parent)
    refusals += map(str, setting_refusals(config, starts_trained=trained))
    refusals += map(str, suite_refusals(config))
    model = stage_architecture(config)
    if stage and parent:
        before = stage_architecture(parent.config).architecture()
        carried = carry_refusals(stage, parent, wanted=model.architecture(), trained=before)
        refusals += map(str, carried)
    unfit = _layout_refusals(config, model, cluster.ranks)
    refusals += unfit
    parallel = config.parallelism
    model_parallel = parallel.tensor_parallel_degree * parallel.context_parallel_degree
    data_parallel = max(1, cluster.ranks // model_parallel)
    replicas = parallel.data_parallel_replicate_degree
    with compat.assuming("cuda"):  # in what Muon computes
        states = config.optimizer_states
    shape = step_shape(
        training=config.training,
        parallelism=parallel,
        activation_checkpoint=config.activation_checkpoint,
        fp32_visit_sum=config.fsdp.fp32_visit_sum,
        world_size=cluster.ranks,
        device_type="cuda",
        compute_bytes=cluster.compute_bytes,
        recurrent_steps=most_recurrent_steps(config.recurrence),
        backward_steps=config.recurrence.most_backward_steps,
        trainable=config.trainable,
        states=states,
    )
    fsdp, _ = config.fsdp.decided(model, shape, cluster.gpu.memory_bytes)
    hold_layers = fsdp.policy == "per_step"
    estimates: dict[Checkpointing, StepMemory] = {
        checkpointing: estimate_memory(
            model, replace(shape, checkpointing=checkpointing), hold_layers=hold_layers
        )
        for checkpointing in CHECKPOINTING
    }
    sizes = batch_sizes(config.batch, shape.seq_len, config.total_tokens)
    if not unfit:  # else the ranks are split in no way that could be judged
        refusals += map(str, batch_refusals(config, cluster.ranks))
    refusals += _memory_refusals(shape, estimates, cluster.gpu)
    tokens = config.windows_of_the_run() * shape.seq_len
    depths = depths_over(config.recurrence, config.total_tokens)
    mean_steps = math.fsum(r * count for (r, _), count in depths.items()) / depths.total()
    flops = mean_flops(config, model)
    accumulation = -(-max(sizes) // (data_parallel * shape.windows))
    return StageNeeds(
        name=name,
        units=unit_sizes(model),
        flops_per_token=flops,
        flops_at_one=model.training_flops(shape.seq_len, 1, config.trainable),
        mean_recurrent_steps=mean_steps,
        shape=shape,
        tokens=tokens,
        steps=_steps(config),
        batch_windows=(min(sizes), max(sizes)),
        data_parallel_ranks=data_parallel,
        policy=fsdp.policy,
        memory=estimates[shape.checkpointing],
        activations={name: memory.activations for name, memory in estimates.items()},
        traffic=step_traffic(
            model,
            shape,
            hold_layers=hold_layers,
            micro_batches=accumulation,
            replicas=replicas,
        ),
        gpu_days=tokens * flops.total / (cluster.peak_flops * cluster.mfu * SECONDS_PER_DAY),
        data=data,
        refusals=refusals,
    )


def _data(config: LoopTrainer.Config) -> tuple[str, list[str]]:
    """Say whether there is enough data, where that can be told."""
    if not are_prepared(config):
        return "not here", []
    try:
        config.open_data().require_windows(config.windows_of_the_run())
    except UserError as error:
        return "too little", [f"data: {error}"]
    return "enough", []


def _layout_refusals(
    config: LoopTrainer.Config, model: LoopDecoder.Config, ranks: int
) -> list[str]:
    found = [
        str(refusal)
        for refusal in (*layout_refusals(config, model, ranks), *model_refusals(config, model))
    ]
    parallel = config.parallelism
    degrees = (
        parallel.tensor_parallel_degree,
        parallel.context_parallel_degree,
        parallel.data_parallel_replicate_degree,
    )
    if found and min(degrees) < 1:
        raise UserError(found[0])  # there is nothing to compute a table from
    return found


def _memory_refusals(
    shape: StepShape, estimates: dict[Checkpointing, StepMemory], gpu: Device
) -> list[str]:
    usable = USABLE_SHARE * gpu.memory_bytes
    memory = estimates[shape.checkpointing]
    if memory.peak <= usable:
        return []
    fitting = [name for name, other in estimates.items() if other.peak <= usable]
    flags = {
        "recurrent-step+full": "activation-checkpoint:recurrent-step "
        "--activation-checkpoint.layers full"
    }
    if fitting:
        fix = f"use {flags.get(fitting[0], f'activation-checkpoint:{fitting[0]}')}"
    elif memory.persistent > usable:
        fix = "use more GPUs, parameters, gradients and moments alone do not fit"
    elif shape.windows > 1:
        fix = "use a smaller --training.local-batch-size"
    else:
        fix = "share windows with a larger --parallelism.context-parallel-degree"
    return [
        f"a GPU would need {memory.peak / 2**30:.0f} GiB of {usable / 2**30:.0f} usable with "
        f"checkpointing {shape.checkpointing}; {fix}"
    ]


def _steps(config: LoopTrainer.Config) -> int:
    steps = plan_steps(config.batch, config.total_tokens, config.training.seq_len)
    return min(steps, config.training.steps) if config.training.steps else steps
