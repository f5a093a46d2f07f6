"""Goes through the stages of a recipe as one rank of a cluster that is not there.

    stage ─► the real trainer, spread over all ranks of a fake process group ─► fake tensors
    ─► a short step, which compiles and makes moments ─► a step that is measured
    ─► a short held-out pass ─► a checkpoint's plan ─► compiled code is forgotten: the next stage

What breaks here would break in the queue. Collectives and memory stand beside what `plan` says.
"""

import gc
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.distributed import ParallelDims

from titan_loop.distributed.communication import step_traffic
from titan_loop.distributed.compiler import forget_compiled_stage
from titan_loop.errors import UserError
from titan_loop.evaluation.window_scores import at_depths
from titan_loop.planning.absent_gpu import absent_gpu
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.made_up_windows import MadeUpWindows, made_up
from titan_loop.planning.same_assembly import assembly
from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.planning.step_meter import Moved, StepMeter
from titan_loop.recipes.recipe import Recipe
from titan_loop.tables import columns
from titan_loop.training.chosen_model import stage_architecture
from titan_loop.training.resolved_run import ResolvedRun, resolve
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.trainer import LoopTrainer

NOT_REHEARSED = (
    "kernels: inductor and Triton, Flex's tuning, and the memory single kernels work in; graphs "
    "are traced and run operation by operation (aot_eager)",
    "NCCL: its memory, its time-outs, and whether collectives overlap with computation",
    "streams, pinned memory (CPU offload, full-offload, async_with_pinned_mem) and CUDA graphs; "
    "with offloading, what is on the host counts as the GPU's",
    "fragmentation of the allocator, and the building of attention masks",
    "values: data, losses, the exit of a curriculum; reading and writing files",
    "model.attention=varlen: its shapes depend on where documents end",
)
"""What no process without a GPU can tell, printed under every rehearsal."""

_HEADINGS = (
    "stage",
    "",
    "micro-batches",
    "collectives",
    "plan",
    "GiB received",
    "plan",
    "peak GiB",
    "plan",
    "off by",
    "checkpoint GiB",
    "CPU seconds",
)
_FEW_STEPS = 2  # R of what is not measured; every further step is the same code
_LONGEST_FAULT = 300


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What the rehearsal of one stage found.

    Attributes:
        needs: What `plan` says of the stage.
        fault: Why it was not assembled, in one line; empty if it was.
        like: Name of the stage that was rehearsed in its place; empty if it was itself.
        cpu_seconds: Processor time that took: the time on one core that has nothing else to do.
        micro_batches: Micro-batches of the step that was measured, of those plan counts.
        moved: Collectives of that step by kind.
        planned: The same as `plan` counts them.
        peak_bytes: The most that was held during the step.
        checkpoint_bytes: What the rank would write to a checkpoint.
    """

    needs: StageNeeds
    fault: str = ""
    like: str = ""
    cpu_seconds: float = 0.0
    micro_batches: int = 0
    moved: Mapping[str, Moved] = field(default_factory=dict)
    planned: Mapping[str, Moved] = field(default_factory=dict)
    peak_bytes: float = 0.0
    checkpoint_bytes: int = 0


def rehearse(
    recipe: Recipe, cluster: Cluster, planned: Sequence[StageNeeds]
) -> Iterator[Rehearsed]:
    """Go through the planned stages; one after the other in this process, as training would.

    A stage that differs from an earlier one in nothing that a rehearsal sees has its result.

    Args:
        recipe: Made under `compat.assuming("cuda")`, so that its defaults are those of a GPU.
            Neither its data nor its parents' checkpoints need to be there.
        cluster: What it is to run on.
        planned: What its stages need on the cluster, none of them refused.

    Yields:
        What was found, stage by stage.

    Raises:
        UserError: This process is a rank of a launcher.
    """
    before: list[tuple[Any, Rehearsed]] = []
    for needs in planned:
        config = recipe.stage(needs.name).config
        own = assembly(config, needs, _micro_batches(needs))
        if found := next((found for other, found in before if other == own), None):
            yield replace(found, needs=needs, like=found.needs.name, cpu_seconds=0.0)
            continue
        began = time.process_time()
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = _rehearse(config, needs, cluster, folder)
        except Exception as error:  # whatever breaks is what was looked for
            found = Rehearsed(needs=needs, fault=_one_line(error))
        found = replace(found, cpu_seconds=time.process_time() - began)
        before.append((own, found))
        yield found
        forget_compiled_stage()
        gc.collect()


def _micro_batches(needs: StageNeeds) -> int:
    """Return the number in the step that is measured: accumulation shows from the second on."""
    return min(2, max(1, int(needs.accumulation[1])))


def _rehearse(
    config: LoopTrainer.Config, needs: StageNeeds, cluster: Cluster, folder: str
) -> Rehearsed:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    meter = StepMeter(fake_mode)

    def build_mask(*args: Any, **options: Any) -> Any:
        with meter.paused():  # the compiled function holds no mask of all queries and keys
            return create_block_mask(*args, **options)

    with absent_gpu(cluster, build_mask), ExitStack() as faking:
        run = resolve(_without_files(config, folder), cluster.ranks)
        spec = run.config.model_spec
        assert spec is not None
        spread = spec.parallelize_fn

        def spread_then_fake(model: Any, **options: Any) -> Any:
            model = spread(model, **options)  # meshes read values, so that comes before
            faking.enter_context(fake_mode)
            faking.enter_context(meter)
            return model

        spec.parallelize_fn = spread_then_fake
        trainer = _Rehearsing(run)
        try:
            return _one_step(trainer, run, needs, meter)
        finally:
            faking.close()
            trainer.close()


def _one_step(
    trainer: LoopTrainer, run: ResolvedRun, needs: StageNeeds, meter: StepMeter
) -> Rehearsed:
    config, deepest = run.config, needs.shape.recurrent_steps
    share, pass_windows = trainer.window_share, needs.data_parallel_ranks * needs.shape.windows
    micro_batches = _micro_batches(needs)
    plan = replace(trainer.plan, windows=pass_windows, recurrent_steps=min(_FEW_STEPS, deepest))
    trainer.update(plan)
    meter.reset()
    trainer.update(replace(plan, windows=micro_batches * pass_windows, recurrent_steps=deepest))
    peak_bytes, moved = meter.peak_bytes, meter.moved
    meter.reset()

    depths = sorted({min(_FEW_STEPS, depth) for depth in (*config.held_out.depths, deepest)})
    columns_ = config.dataloader.columns()
    trainer.model.eval()
    with trainer.train_context():
        windows = made_up(needs.shape.windows, config.training.seq_len, columns_)
        at_depths(trainer.model, depths, share)(windows)
    trainer.model.train()

    planner = DefaultSavePlanner()
    planner.set_up_planner(trainer.checkpointer.tensors(), is_coordinator=True)
    with unset_fake_temporarily():  # it computes places in the whole tensors
        writes = [item.tensor_data for item in planner.create_local_plan().items]
    planned = _by_kind(
        step_traffic(
            run.model,
            needs.shape,
            hold_layers=needs.policy == "per_step",
            micro_batches=micro_batches,
            replicas=config.parallelism.data_parallel_replicate_degree,
        )
    )
    return Rehearsed(
        needs=needs,
        micro_batches=micro_batches,
        moved=moved,
        planned=planned,
        peak_bytes=peak_bytes,
        checkpoint_bytes=sum(
            write.chunk.sizes.numel() * write.properties.dtype.itemsize for write in writes if write
        ),
    )


class _Rehearsing(LoopTrainer):
    """Locks no folder: nobody else trains in a temporary one."""

    def init_distributed(self) -> ParallelDims:
        self.run_lock = None
        return super(LoopTrainer, self).init_distributed()


def _without_files(config: LoopTrainer.Config, folder: str) -> LoopTrainer.Config:
    """Return the stage's config with nothing to read, and only `folder` to write to."""
    vocab_size = stage_architecture(config).vocab_size
    config = replace(deepcopy(replace(config, callbacks=())), dump_folder=folder)
    config.held_out.interval, config.suite.interval, config.best = 0, 0, False
    config.dataloader = MadeUpWindows.Config(instead_of=config.dataloader, vocab_size=vocab_size)
    config.checkpoint.carry.parent = config.checkpoint.remote = ""
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.stability = StabilityConfig()  # it reads values
    config.profiler.enable_profiling = config.profiler.enable_memory_snapshot = False
    config.training.disable_cuda_graphs = True
    config.compile.backend = "aot_eager"
    return config


def _by_kind(traffic: Iterable[Any]) -> dict[str, Moved]:
    kinds: dict[str, Moved] = {}
    for entry in traffic:
        moved = kinds.setdefault(entry.kind, Moved())
        moved.count += entry.count
        moved.received_bytes += entry.received_bytes
    return kinds


def _one_line(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{error.func} needs values, which fake tensors do not have"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{name}{text}"[:_LONGEST_FAULT]


def rehearsal_lines(found: Sequence[Rehearsed], cluster: Cluster) -> list[str]:
    """Return a table with a row per stage, why stages failed, and what was not rehearsed.

    Args:
        found: Stages, of which at least one.
        cluster: What they were rehearsed for.
    """
    rows = [[*_HEADINGS]]
    for one in found:
        state = "not assembled" if one.fault else "assembled"
        cells = [one.needs.name, f"as {one.like}" if one.like else state]
        if one.fault:
            cells += [""] * 9
        else:
            cells += [
                f"{one.micro_batches} of {one.needs.accumulation[1]:g}",
                f"{_count(one.moved):,}",
                f"{_count(one.planned):,}",
                _gib(_received(one.moved)),
                _gib(_received(one.planned)),
                _gib(one.peak_bytes),
                _gib(one.needs.memory.peak),
                f"{one.needs.memory.peak / one.peak_bytes - 1:+.0%}",
                _gib(one.checkpoint_bytes),
            ]
        rows.append([*cells, f"{one.cpu_seconds:.0f}"])
    alike = any(one.like for one in found)
    return [
        f"rehearsed as rank 0 of {cluster.ranks:,}, fake tensors on a fake process group",
        *columns(rows, left=(0, 1)),
        *(["as STAGE: differs from it in data, seed, rates, length or other values alone"] * alike),
        *(f"{one.needs.name}: {one.fault}" for one in found if one.fault),
        *(f"not rehearsed: {what}" for what in NOT_REHEARSED),
    ]


def _count(moved: Mapping[str, Moved]) -> int:
    return sum(kind.count for kind in moved.values())


def _received(moved: Mapping[str, Moved]) -> float:
    return sum(kind.received_bytes for kind in moved.values())


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}"
