"""Every reason why a run cannot start, found before a process group or a device is touched.

    value_refusals             single values and schedules, on any machine
    device_refusals            settings that need a GPU where there is none
    setting_refusals           settings that contradict each other, on any machine
    data_refusals              opens the prepared data
    model_refusals             missing columns and outputs, too many steps
    layout_, batch_refusals    layout_preflight.py: parallelism, batches

Each may rely on the checks before it. `resolve` raises the first of them, and `titan-loop plan`
prints those that need no machine. `remarks` names settings without effect.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

import titan_loop.compat as compat  # before any torchtitan module
from annotated_types import Ge, Gt, Le

from titan_loop.bounds import Hint, bound_refusals, refused
from titan_loop.distributed.float8 import missing_for_float8
from titan_loop.errors import Refusal, UserError, caught
from titan_loop.models.context import PREFIX
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import resolved_shape
from titan_loop.training.chosen_model import ChosenModel, chosen_model, stage_architecture
from titan_loop.training.config import RunConfig
from titan_loop.training.depth_schedule import fewest_recurrent_steps, most_recurrent_steps
from titan_loop.training.layout_preflight import batch_refusals, layout_refusals
from titan_loop.training.stability.config import StabilityConfig

LARGEST_SEED = 2**63 - 1
"""torch takes 64 bits, and steps and ranks are mixed into them."""

_UPSTREAM: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "training.seq_len",
            "training.local_batch_size",
            "training.gc_freq",
            "metrics.log_freq",
            "comm.init_timeout_seconds",
            "comm.train_timeout_seconds",
            "parallelism.data_parallel_replicate_degree",
            "parallelism.tensor_parallel_degree",
            "parallelism.context_parallel_degree",
            "parallelism.expert_parallel_degree",
        ),
        Annotated[int, Ge(1)],
    ),
    "training.max_norm": Annotated[float, Gt(0), Hint("inf clips no gradient, 1 is usual")],
    "training.steps": Annotated[int, Ge(0), Hint("0 means no limit")],
    "training.global_batch_size": Annotated[Literal[-1], Hint("set --batch.global-batch-tokens")],
    "training.disable_cuda_graphs": Annotated[
        Literal[True],
        Hint("a graph of a whole step cannot follow R and schedules; use --compile.graphs"),
    ],
    "training.dtype": Annotated[
        Literal["float32"],
        Hint(
            "others round weights and moments after every update, and layers compute in "
            "training.mixed_precision_param anyway"
        ),
    ],
    "checkpoint.load_step": Annotated[
        Literal[-1], Hint("the newest is loaded; delete newer ones to go back")
    ],
    "metrics.save_for_all_ranks": Annotated[Literal[False], Hint("every metric is global")],
    "parallelism.pipeline_parallel_degree": Literal[1],
    "parallelism.enable_fsdp_symm_mem": Literal[False],
    "parallelism.spmd_backend": Annotated[
        Literal["partial_dtensor", "spmd_types"],
        Hint("full_dtensor doubles the loss under tensor parallelism on torch 2.13"),
    ],
    "debug.seed": Annotated[int, Ge(0), Le(LARGEST_SEED)],
    "comm.mode": Annotated[Literal["default"], Hint("the others replace communication with stubs")],
}
"""Bounds and choices of torchtitan's fields, which it would accept and fail in mid-run."""


class Examined(NamedTuple):
    """The reasons against a run, and its model; None if a reason keeps it from being chosen."""

    refusals: list[Refusal]
    model: ChosenModel | None


def examined(config: RunConfig, world_size: int, saved: Mapping[str, Any]) -> Examined:
    """Find the reasons why `world_size` ranks on this machine cannot train `config`.

    `saved` is from `saved_architecture`.
    """
    found = [*value_refusals(config)]
    if found:
        return Examined(found, None)  # nothing below could be computed
    found += device_refusals(config)
    starts_trained = bool(config.checkpoint.carry.parent or saved)
    found += setting_refusals(config, starts_trained=starts_trained)
    if unfit := [*data_refusals(config)]:
        return Examined(found + unfit, None)
    try:
        chosen = chosen_model(config, saved)
    except UserError as error:
        return Examined([*found, Refusal("model", str(error))], None)
    found += model_refusals(config, chosen.config)
    unfit = [*layout_refusals(config, chosen.config, world_size)]
    # A batch can be judged only on a layout that fits.
    found += unfit or batch_refusals(config, world_size)
    return Examined(found, chosen)


def value_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse values that no run can have."""
    yield from bound_refusals("", config)
    for name, hint in _UPSTREAM.items():
        yield from refused(name, attrgetter(name)(config), hint)
    known = config.optimizers()
    if (name := config.optimizer.name) not in known:
        yield Refusal.of("optimizer.name", name, "is unknown", f"use {' or '.join(known)}")
    yield from config.recurrence.refusals()
    if config.training.seq_len >= 1:
        yield from config.batch.refusals(config.training.seq_len)


def setting_refusals(config: RunConfig, *, starts_trained: bool) -> Iterator[Refusal]:
    """Refuse settings that contradict each other, with any data and any number of ranks.

    `starts_trained` says whether the run starts from trained weights.
    """
    yield from config.loss.refusals(
        trainable=config.trainable,
        exit_gate=config.model.exit_gate,
        fewest_steps=fewest_recurrent_steps(config.recurrence),
    )
    yield from config.loss.parallelism_refusals(config.parallelism)
    yield from _depth_refusals(config, starts_trained=starts_trained)
    yield from config.optimizers()[config.optimizer.name].refusals(
        trainable=config.trainable, training=config.training, parallelism=config.parallelism
    )
    yield from caught("checkpoint", config.checkpoint.check)
    yield from _checkpoint_refusals(config, starts_trained=starts_trained)
    for name, asked in (("held_out", config.held_out), ("suite", config.suite)):
        if asked.interval != 0 and not asked.depths:
            yield Refusal.of(f"{name}.depths", asked.depths, "names none", "name at least one")
    measured = config.held_out.interval if config.best else None
    yield from config.stability.refusals(checkpoint=config.checkpoint, best_interval=measured)


def _checkpoint_refusals(config: RunConfig, *, starts_trained: bool) -> Iterator[Refusal]:
    """Refuse what would save or load checkpoints where none are saved or loaded."""
    asked, carry = config.checkpoint, config.checkpoint.carry
    off = "has no effect with checkpoint.enable=False"
    if carry.parent and not asked.enable:
        fix = "set checkpoint.load_only=True instead, which loads but saves nothing"
        yield Refusal.of("checkpoint.carry.parent", carry.parent, off, fix)
    if asked.remote and not asked.enable:
        yield Refusal.of("checkpoint.remote", asked.remote, off, "leave it out")
    if config.best and (asked.load_only or not asked.enable):
        problem = "keeps a checkpoint, and none are saved"
        fix = "set checkpoint.enable=True (and load_only=False), or leave it out"
        yield Refusal.of("best", True, problem, fix)
    for name, plain in (("upcycle", "no"), ("keep_initial", [])):
        if not starts_trained and (value := getattr(carry, name)) != plain:
            problem = "has no effect without weights to start from; set checkpoint.carry.parent"
            yield Refusal.of(f"checkpoint.carry.{name}", value, problem)


def _depth_refusals(config: RunConfig, *, starts_trained: bool) -> Iterator[Refusal]:
    """Refuse depths that do not suit the data, or that leave a part of the model untrained."""
    recurrence, task = config.recurrence, config.dataloader.generated_task()
    needed = None if task is None else task.most_steps
    if recurrence.from_data and not config.dataloader.knows_depth():
        problem = "needs data with a number of steps for every example; set it to False, or "
        yield Refusal.of("recurrence.from_data", True, problem + "choose such a task")
    if recurrence.from_data and needed is not None and (recurrence.max_steps or 0) < needed:
        problem = f"is less than the {needed} steps that the deepest examples need; use {needed}"
        problem += ", or shallower examples"
        yield Refusal.of("recurrence.max_steps", recurrence.max_steps, problem)
    changes = recurrence.steps.smallest != recurrence.steps.largest
    if config.loss.one_depth and (recurrence.poisson or recurrence.from_data or changes):
        how = "poisson" if recurrence.poisson else "from_data" if recurrence.from_data else "steps"
        given = repr(str(recurrence.steps)) if how == "steps" else True
        problem = "changes R, and the objective needs one R in all steps"
        fix = "make a stage of each R" if how == "steps" else "leave it out"
        yield Refusal.of(f"recurrence.{how}", given, problem, fix)
    told = config.loss.labels_every_step and not recurrence.from_data
    if told and needed is not None and fewest_recurrent_steps(recurrence) < needed:
        problem = f"is less than the {needed} steps of the deepest examples, whose last values "
        fix = f"use {needed}, recurrence.from_data=True, or shallower examples"
        given = repr(str(recurrence.steps))
        yield Refusal.of("recurrence.steps", given, f"{problem}would have no label", fix)
    if not starts_trained and (untrained := _untrained_embedding(config)):
        fix = "set model.tie_weights=True, raise it to an R that occurs, or start from trained "
        fix += "weights (checkpoint.carry.parent)"
        yield Refusal("recurrence.backward_steps", untrained, fix)


def device_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse settings that need a device that this machine lacks."""
    if config.float8 != "off" and (missing := missing_for_float8()):
        yield Refusal.of("float8", config.float8, missing)
    if compat.device_type() != "cpu":
        return
    if config.training.enable_cpu_offload:
        problem = "moves weights off a GPU, and there is none; leave it False"
        yield Refusal.of("training.enable_cpu_offload", True, problem)
    if config.compile.graphs:
        problem = "replays CUDA graphs, and there is no CUDA; leave it False"
        yield Refusal.of("compile.graphs", True, problem)
    for name in ("profiler.enable_memory_snapshot", "training.gc_debug"):
        if attrgetter(name)(config):
            problem = "records CUDA allocations, and there is no CUDA; leave it False"
            yield Refusal.of(name, True, problem)


def data_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse data that cannot be opened, does not fit model and objective, or is too short."""
    yield from config.dataloader.refusals(
        config.loss, local_batch_size=config.training.local_batch_size
    )
    try:
        vocabulary, loader = config.dataloader.vocabulary(), config.open_data()
    except UserError as error:
        yield Refusal("dataloader", str(error))
        return
    largest = vocabulary.largest_token
    rows = config.model.vocab_size or vocabulary.size
    if largest >= rows:
        problem = f"is too small: the data's largest token is {largest}"
        fix = f"use {largest + 1} or more, or leave it unset"
        yield Refusal.of("model.vocab_size", rows, problem, fix)
    for name, needed in vocabulary.options.items():
        given = getattr(config.model, name, None) or ()
        if any(own < least for own, least in zip(given, needed, strict=False)):
            problem = f"is too small: the data needs {needed}"
            yield Refusal.of(f"model.{name}", given, problem, "leave it unset")
    yield from caught("total_tokens", lambda: loader.require_windows(config.windows_needed()))
    sources, seq_len = config.dataloader.source_paths(), config.training.seq_len
    yield from config.held_out.data_refusals(sources, rows, seq_len)
    if config.best and (
        config.held_out.interval == 0 or not config.held_out.scored(sources, seq_len)
    ):
        problem = (
            "needs held-out text that is scored: set held_out.interval above 0, or leave it out"
        )
        yield Refusal.of("best", True, problem)


def model_refusals(config: RunConfig, model: LoopDecoder.Config) -> Iterator[Refusal]:
    """Refuse a loss, model or data that lacks what another of them needs, and too many steps."""
    declared = config.dataloader.columns()
    for reader, wanted in (("loss", config.loss.columns), ("model", model.columns)):
        there = {column.name for column in declared if column.reader in (reader, "both")}
        if missing := [name for name in wanted if name not in there]:
            loader, known = type(config.dataloader).__qualname__, ", ".join(sorted(there))
            problem = f"the {reader} reads {', '.join(missing)}, and dataloader={loader} declares "
            problem += f"{known or 'no columns'} for it"
            fix = "choose a loader that has them, or add them to its columns"
            yield Refusal("dataloader", problem, fix)
    if config.dataloader.prefix and PREFIX not in model.columns:
        problem = f"has no effect on model.family={model.family}, which reads no prefixes"
        yield Refusal.of("dataloader.prefix", True, problem, "leave it out, or set model.prefix_lm")
    yield from config.loss.model_refusals(model)
    for name, setting in config.loss.aux().items():
        if name not in model.aux:
            problem = f"{setting} needs layers with {name}, and layers of "
            problem += f"model.family={model.family} have none"
            yield Refusal(setting.partition("=")[0], problem, "leave it out")
    if model.most_steps is None:
        return
    asked = {"recurrence.steps": [most_recurrent_steps(config.recurrence)]}
    if config.held_out.interval != 0 and config.dataloader.source_paths():
        asked["held_out.depths"] = config.held_out.depths
    if config.suite.interval:
        asked["suite.depths"] = config.suite.depths
    for name, steps in asked.items():
        if max(steps, default=1) > model.most_steps:
            problem = f"model.family={model.family} has at most {model.most_steps} recurrent step"
            yield Refusal(name, f"{name}={max(steps)}: {problem}", f"use {model.most_steps}")


def remarks(config: RunConfig) -> Iterator[str]:
    """Yield a remark on each setting that does less than it seems to, in a run without refusals."""
    yield from config.held_out.remarks(config.dataloader.source_paths(), config.training.seq_len)
    rate, end = config.learning_rate, config.total_tokens
    if (last := rate.knots[-1].tokens) > end and rate(end) > rate.knots[-1].value:
        yield (
            f"learning_rate falls until {last:,} tokens and total_tokens={end:,} ends at a rate of "
            f"{rate(end):.3g}, not {rate.knots[-1].value:.3g}: give --learning-rate a schedule "
            "that ends there, or --total-flops, which stretches it"
        )
    if last < end and rate.knots[-1].value == 0:
        yield (
            f"learning_rate is 0 from {last:,} tokens on, so nothing is learnt until "
            f"total_tokens={end:,}: give --learning-rate a schedule that ends there"
        )
    if config.float8 != "off" and compat.device_type() == "cpu":
        yield f"float8={config.float8} is emulated without a GPU: its rounding, and slower"
    if not config.stability.skip_spikes and config.stability != StabilityConfig():
        yield "the settings under stability have no effect without stability.skip_spikes=True"
    for name, settings in config.optimizers().items():
        if name not in (config.optimizer.name, "adamw") and settings != type(settings)():
            yield f"the settings under {name} have no effect without optimizer.name={name}"
    if untrained := _untrained_embedding(config):
        yield f"{untrained}: it stays as it was"
    reader, steps = config.model.reader_of_steps(), config.recurrence.steps.largest
    if reader and (built := resolved_shape(config.model).recurrent_steps) != round(steps):
        yield (
            f"model.{reader} is made for model.recurrent_steps={built} steps, and recurrence.steps "
            f"reaches {steps:g}; start a run with --model.recurrent-steps {round(steps)}"
        )


def _untrained_embedding(config: RunConfig) -> str:
    """Return the reason why no step trains the embedding; empty if one does."""
    reached = config.recurrence.most_backward_steps
    fewest = fewest_recurrent_steps(config.recurrence)
    # A tied embedding trains as the head.
    trains_elsewhere = config.trainable != "all" or config.model.tie_weights
    if reached is None or fewest <= reached or trains_elsewhere:
        return ""
    if stage_architecture(config).reaches_start(fewest, reached):
        return ""  # every step reads it, as with an injection
    field = "backward_steps" if config.recurrence.backward_growth is None else "backward_growth"
    return (
        f"recurrence.{field}={getattr(config.recurrence, field)} never reaches the embedding, "
        f"which step 1 alone reads, and R is {fewest} or more"
    )
