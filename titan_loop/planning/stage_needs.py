"""The exact needs of a stage on a cluster: states, FLOPs, steps, batches, GPU-days.

Pure arithmetic: no process group, no device, no parameter. GPU-days follow from the model FLOPs
(recomputation does not count) and an assumed utilisation. Peaks of memory and collectives come from
`rehearsal.py`.
"""

import math
from dataclasses import dataclass

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.config import TORCH_DTYPE_MAP

from titan_loop.distributed.activation_checkpointing import checkpointing_of
from titan_loop.distributed.devices import USABLE_SHARE, Device
from titan_loop.distributed.state_bytes import StateBytes, unit_sizes
from titan_loop.errors import Refusal, UserError, raise_first
from titan_loop.evaluation.suites import suite_refusals
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.units import UnitSize
from titan_loop.planning.cluster import Cluster
from titan_loop.recipes.preflight import carry_refusals, repetition_refusals
from titan_loop.recipes.recipe import Recipe
from titan_loop.training.batch_schedule import batch_sizes
from titan_loop.training.chosen_model import are_prepared, stage_architecture
from titan_loop.training.depth_schedule import depths_over, most_recurrent_steps
from titan_loop.training.flop_budget import mean_flops
from titan_loop.training.layout_preflight import batch_refusals, layout_refusals, run_states
from titan_loop.training.preflight import model_refusals, setting_refusals, value_refusals
from titan_loop.training.trainer import LoopTrainer

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """One stage on a cluster; `refusals` are the reasons why it cannot run there.

    Attributes:
        model: Architecture, with the vocabulary of the data, or the default if no data is here.
        flops_per_token: Forward and backward FLOPs at the mean R.
        flops_at_one: The same at R = 1.
        batch_windows: Smallest and largest global batch, in windows.
        data_parallel_ranks: Number of ranks that read different windows.
        policy: FSDP policy, per_visit or per_step, with `auto` decided.
        states: Bytes of weights, gradients and moments on one rank.
        data: "enough", "too little" or "not here".
    """

    name: str
    config: LoopTrainer.Config
    model: LoopDecoder.Config
    units: list[UnitSize]
    flops_per_token: Flops
    flops_at_one: Flops
    mean_recurrent_steps: float
    recurrent_steps: int
    tokens: int
    steps: int
    batch_windows: tuple[int, int]
    data_parallel_ranks: int
    policy: str
    states: StateBytes
    gpu_flops: float
    gpu_days: float
    data: str
    refusals: list[str]

    @property
    def accumulation(self) -> tuple[float, float]:
        """Micro-batches of a rank in the smallest and the largest batch; whole unless refused."""
        per_pass = self.data_parallel_ranks * self.config.training.local_batch_size
        smallest, largest = self.batch_windows
        return smallest / per_pass, largest / per_pass


def recipe_needs(recipe: Recipe, cluster: Cluster, *, only: str | None = None) -> list[StageNeeds]:
    """Compute the needs of every stage of a recipe, or of `only` one.

    Make the recipe under `compat.assuming("cuda")`, so that it has a GPU's defaults.
    """
    needs: list[StageNeeds] = []
    for stage in recipe.chosen(only):
        try:
            needs.append(stage_needs(stage.name, stage.config, cluster, recipe=recipe))
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
    return needs


def stage_needs(
    name: str, config: LoopTrainer.Config, cluster: Cluster, *, recipe: Recipe | None = None
) -> StageNeeds:
    """Compute the needs of one stage, whose config is not resolved: the data need not be here.

    `recipe` is for checks against the stage's parent; None for a run alone. Raises `UserError` for
    a value, an architecture or a schedule that is wrong on any cluster.
    """
    raise_first(value_refusals(config))
    data, refusals = _data(config)
    model = stage_architecture(config)
    refusals += _setting_refusals(name, config, model, recipe, has_data=data == "enough")
    unfit = [*layout_refusals(config, model, cluster.ranks), *model_refusals(config, model)]
    refusals += map(str, unfit)
    if not unfit:  # else the ranks' shares are undefined
        refusals += map(str, batch_refusals(config, cluster.ranks))
    training, parallel, gpu = config.training, config.parallelism, cluster.gpu
    units, states = unit_sizes(model), run_states(config, model, cluster.ranks)
    compute_bytes = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    fsdp, _ = config.fsdp.decided(
        units, parallel, compute_bytes=compute_bytes, device_bytes=gpu.memory_bytes
    )
    sizes = batch_sizes(config.batch, training.seq_len, config.total_tokens)
    tokens = config.windows_of_the_run() * training.seq_len
    depths = depths_over(config.recurrence, config.total_tokens)
    flops = mean_flops(config, model)
    mean_steps = math.fsum(r * count for (r, _), count in depths.items()) / depths.total()
    model_parallel = parallel.tensor_parallel_degree * parallel.context_parallel_degree
    gpu_flops = gpu.peak_flops if compute_bytes == 2 else gpu.fp32_peak_flops
    return StageNeeds(
        name=name,
        config=config,
        model=model,
        units=units,
        flops_per_token=flops,
        flops_at_one=model.training_flops(training.seq_len, 1, config.trainable),
        mean_recurrent_steps=mean_steps,
        recurrent_steps=most_recurrent_steps(config.recurrence),
        tokens=tokens,
        steps=config.last_step(tokens=0, steps=0),
        batch_windows=(min(sizes), max(sizes)),
        data_parallel_ranks=max(1, cluster.ranks // model_parallel),
        policy=fsdp.policy,
        states=states,
        gpu_flops=gpu_flops,
        gpu_days=tokens * flops.total / (gpu_flops * cluster.mfu * SECONDS_PER_DAY),
        data=data,
        refusals=refusals,
    )


def memory_refusal(need: StageNeeds, peak_bytes: float, gpu: Device) -> str | None:
    """Return the reason why a step with this peak fits no GPU, and a fix; None if it fits."""
    usable = USABLE_SHARE * gpu.memory_bytes
    if peak_bytes <= usable:
        return None
    policy = checkpointing_of(need.config.activation_checkpoint)
    if policy in _MORE_RECOMPUTATION:
        fix = f"use {_MORE_RECOMPUTATION[policy]}"
    elif need.config.training.local_batch_size > 1:
        fix = "use a smaller --training.local-batch-size"
    else:
        fix = "share windows with a larger --parallelism.context-parallel-degree"
    return (
        f"a GPU would need {peak_bytes / 2**30:.0f} GiB of {usable / 2**30:.0f} usable with "
        f"checkpointing {policy}; {fix}"
    )


_MORE_RECOMPUTATION = {
    "none": "activation-checkpoint:selective",
    "memory-budget": "activation-checkpoint:full",
    "selective": "activation-checkpoint:full",
    "full": "activation-checkpoint:recurrent-step --activation-checkpoint.layers full",
    "recurrent-step": "--activation-checkpoint.layers full",
}
"""Checkpointing policy → flags of one that keeps less."""


def _setting_refusals(
    name: str,
    config: LoopTrainer.Config,
    model: LoopDecoder.Config,
    recipe: Recipe | None,
    *,
    has_data: bool,
) -> list[str]:
    refusals: list[Refusal] = []
    stage = None if recipe is None else recipe.stage(name)
    parent = recipe.stage(stage.parent) if recipe and stage and stage.parent else None
    if has_data and recipe and stage and len(recipe.stages) > 1:
        refusals += repetition_refusals(stage)
    trained = parent is not None or bool(config.checkpoint.carry.parent)
    refusals += setting_refusals(config, starts_trained=trained)
    refusals += suite_refusals(config)
    if stage and parent:
        before = stage_architecture(parent.config).architecture
        refusals += carry_refusals(stage, parent, wanted=model.architecture, trained=before)
    return [str(refusal) for refusal in refusals]


def _data(config: LoopTrainer.Config) -> tuple[str, list[str]]:
    """Return whether the data suffices ("not here" if it is elsewhere), and refusals."""
    if not are_prepared(config):
        return "not here", []
    try:
        config.open_data().require_windows(config.windows_of_the_run())
    except UserError as error:
        return "too little", [f"data: {error}"]
    return "enough", []
