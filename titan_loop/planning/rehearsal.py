"""Goes through the stages of a recipe as one rank of a cluster that is not there.

    stage ─► the real trainer, spread over all ranks of a fake process group ─► fake tensors
    ─► a short step, which compiles and makes moments ─► a step that is measured
    ─► a short held-out pass ─► a checkpoint's plan ─► compiled code is forgotten: the next stage

A failure here would be a failure on the cluster. `measured_step.py` keeps the results.
"""

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import dataclass, replace
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

from titan_loop.distributed.compiler import forget_compiled_stage
from titan_loop.errors import UserError
from titan_loop.evaluation.window_scores import at_depths
from titan_loop.planning.absent_gpu import absent_gpu
from titan_loop.planning.cluster import Cluster
from titan_loop.planning.made_up_windows import MadeUpWindows, made_up
from titan_loop.planning.measured_step import (
    MeasuredStep,
    read_measured,
    rehearsal_key,
    write_measured,
)
from titan_loop.planning.stage_needs import StageNeeds
from titan_loop.planning.step_meter import Moved, StepMeter, plus
from titan_loop.training.callback import Callback, TrainingState
from titan_loop.training.resolved_run import ResolvedRun, resolve
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.step_plan import StepPlan
from titan_loop.training.trainer import LoopTrainer

_FEW_STEPS = 2  # R of passes that are not measured; further steps run the same code
_LONGEST_FAULT = 300
KEPT = "measured before"


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The rehearsal of one stage; `fault` is the reason, in one line, if it was not assembled.

    `like` is "as STAGE" if another stage was rehearsed in its place, `KEPT` for the result of an
    earlier command, else empty.
    """

    needs: StageNeeds
    measured: MeasuredStep | None = None
    fault: str = ""
    like: str = ""


def rehearse(
    planned: Sequence[StageNeeds], cluster: Cluster, *, anew: bool = False
) -> Iterator[Rehearsed]:
    """Assemble the planned stages one after the other in this process; yield them in order.

    A stage reuses the result of an earlier stage, or of an earlier command unless `anew`, if their
    rehearsals would be the same. The stages must have no refusals; their data and their parents'
    checkpoints need not be here.
    """
    done: dict[str, Rehearsed] = {}
    for needs in planned:
        key = rehearsal_key(needs, cluster.ranks, _micro_batches(needs))
        if twin := done.get(key):
            yield replace(twin, needs=needs, like=f"as {twin.needs.name}")
            continue
        measured = None if anew else read_measured(key)
        if measured is not None:
            yield Rehearsed(needs=needs, measured=measured, like=KEPT)
            continue
        done[key] = found = _rehearsed(needs, cluster)
        if found.measured is not None:
            write_measured(key, found.measured)
        yield found
        forget_compiled_stage()
        gc.collect()


def known_peak_bytes(needs: StageNeeds, cluster: Cluster) -> float | None:
    """Return the peak that an earlier command measured; None if none did."""
    measured = read_measured(rehearsal_key(needs, cluster.ranks, _micro_batches(needs)))
    return None if measured is None else gpu_peak_bytes(needs, measured)


def gpu_peak_bytes(needs: StageNeeds, measured: MeasuredStep) -> float:
    """Return the peak without the weights and moments that CPU offload keeps on the host."""
    if not needs.config.training.enable_cpu_offload:
        return measured.peak_bytes
    return measured.peak_bytes - needs.states.parameters - needs.states.optimizer


def _rehearsed(needs: StageNeeds, cluster: Cluster) -> Rehearsed:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Rehearsed(needs=needs, measured=_rehearse(needs, cluster, folder))
    except Exception as error:  # a failure of any kind is a result
        return Rehearsed(needs=needs, fault=_one_line(error))


def _micro_batches(needs: StageNeeds) -> int:
    """Return the measured step's number of micro-batches: two show the cost of accumulation."""
    return min(2, max(1, int(needs.accumulation[1])))


def _rehearse(needs: StageNeeds, cluster: Cluster, folder: str) -> MeasuredStep:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    meter = StepMeter(fake_mode)

    # Not counted: the compiled function never holds the whole mask.
    build_mask = meter.paused()(create_block_mask)
    with absent_gpu(cluster, build_mask), ExitStack() as faking:
        # As if from trained weights: a stage may need a parent, which its config here lacks.
        run = resolve(_without_files(needs, folder), cluster.ranks, needs.model.architecture)
        spec = run.config.model_spec
        assert spec is not None
        spread = spec.parallelize_fn

        def spread_then_fake(model: Any, **options: Any) -> Any:
            model = spread(model, **options)  # it reads values of meshes, so it is not faked
            options["parallel_dims"].get_optional_mesh("loss")  # made now on one rank, too
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
) -> MeasuredStep:
    config, deepest = run.config, needs.recurrent_steps
    pass_windows = needs.data_parallel_ranks * config.training.local_batch_size
    plan = replace(trainer.plan, windows=pass_windows, recurrent_steps=min(_FEW_STEPS, deepest))
    trainer.update(plan)
    reached = config.recurrence.most_backward_steps
    if reached is not None and reached < deepest:
        trainer.update(replace(plan, backward_steps=1))  # compiles the layers without gradients
    micro_batches = _micro_batches(needs)
    windows = micro_batches * pass_windows
    plan = replace(plan, windows=windows, recurrent_steps=deepest, backward_steps=reached)
    measured = _measured(trainer, plan, meter, micro_batches)
    meter.reset()
    _hold_out(trainer, run, deepest)
    saved = _checkpoint_bytes(trainer) if trainer.checkpointer.enable else 0
    return replace(measured, checkpoint_bytes=saved)


def _hold_out(trainer: LoopTrainer, run: ResolvedRun, deepest: int) -> None:
    config = run.config
    few = min(_FEW_STEPS, run.model.most_steps or _FEW_STEPS)
    depths = sorted({min(few, depth) for depth in (*config.held_out.depths, deepest)})
    training, columns = config.training, config.dataloader.columns()
    trainer.model.eval()
    with trainer.train_context():
        held_out = made_up(training.local_batch_size, training.seq_len, columns)
        at_depths(trainer.model, depths, trainer.window_share)(held_out)
    trainer.model.train()


def _checkpoint_bytes(trainer: LoopTrainer) -> int:
    planner = DefaultSavePlanner()
    planner.set_up_planner(trainer.checkpointer.tensors(), is_coordinator=True)
    with unset_fake_temporarily():  # the planner computes offsets from values
        writes = [item.tensor_data for item in planner.create_local_plan().items]
    return sum(
        write.chunk.sizes.numel() * write.properties.dtype.itemsize for write in writes if write
    )


def _measured(
    trainer: LoopTrainer, plan: StepPlan, meter: StepMeter, micro_batches: int
) -> MeasuredStep:
    meter.reset()
    before_last: dict[str, Moved] = {}

    def look(*_: Any) -> None:
        before_last.update({kind: copy(moved) for kind, moved in meter.moved.items()})

    before_update = _BeforeUpdate(meter)
    trainer.callbacks.append(before_update)
    # Before FSDP's own hook, which gathers this micro-batch's weights.
    hook = trainer.model.register_forward_pre_hook(look, prepend=True)
    trainer.update(plan)
    trainer.callbacks.remove(before_update)
    hook.remove()
    moved = dict(meter.moved)
    of_gradients = {**moved, "all-to-all": before_update.all_to_all}
    return MeasuredStep(
        micro_batches=micro_batches,
        moved=moved,
        moved_again=plus(of_gradients, before_last, -1),  # of the last micro-batch
        peak_bytes=meter.peak_bytes,
    )


class _BeforeUpdate(Callback):
    """Notes the all-to-alls of experts, which precede `on_gradients`; Muon's follow it."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter, self.all_to_all = meter, Moved()

    def on_gradients(self, trainer: TrainingState) -> None:
        self.all_to_all = copy(self._meter.moved.get("all-to-all", Moved()))


class _Rehearsing(LoopTrainer):
    """A trainer that locks no folder, since its run directory is temporary."""

    def init_distributed(self) -> ParallelDims:
        self.run_lock = None
        return super(LoopTrainer, self).init_distributed()


def _without_files(needs: StageNeeds, folder: str) -> LoopTrainer.Config:
    """Return the stage's config with nothing to read, and only `folder` to write to."""
    vocab_size = needs.model.vocab_size
    config = replace(deepcopy(replace(needs.config, callbacks=())), dump_folder=folder)
    config.held_out.interval, config.suite.interval, config.best = 0, 0, False
    config.dataloader = MadeUpWindows.Config(instead_of=config.dataloader, vocab_size=vocab_size)
    config.checkpoint.carry.parent = config.checkpoint.remote = ""
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.stability = StabilityConfig()  # its verdicts read values
    config.profiler.enable_profiling = config.profiler.enable_memory_snapshot = False
    config.training.disable_cuda_graphs = True
    config.compile.backend, config.compile.graphs = "aot_eager", False
    return config


def _one_line(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{error.func} needs values, which fake tensors do not have"
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{name}{' '.join(str(error).split())}"[:_LONGEST_FAULT]
