"""`LoopTrainer`: torchtitan's trainer with token schedules, loop metrics and safe updates.

One training step:

    plan_step(tokens) ─► R, β, learning rate, windows
    loader.read_step ─► micro-batches ─► forward, backward ─► gradients ─► clip
    finite on all ranks, and no callback objects? ─► update, else skip ─► metrics, callbacks
    any rank asked to stop, or without data for the next step? ─► save and leave

Every schedule is a pure function of the global token count, which does not depend on the number of
ranks. Upstream builds meshes and model and runs the outer loop; other features are callbacks.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import titan_loop.compat as compat  # before any torchtitan module
import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.start_from import check_parent
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.distributed.kept_layouts import KeptLayouts
from titan_loop.errors import DataEndedError, NonFiniteError, StoppedError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.objectives.streamed_loss import StreamedLoss
from titan_loop.ranks import (
    all_ranks,
    from_all_ranks,
    meeting,
    on_rank_zero,
    require_equal,
    warn_together,
)
from titan_loop.runs.run_directory import RunDirectory, library_versions
from titan_loop.storage.kept_records import give_up_kept, write_kept
from titan_loop.training.callback import Callback
from titan_loop.training.config import DEFAULT_SEED, RunConfig
from titan_loop.training.depth_schedule import typical_recurrent_steps
from titan_loop.training.gradients import Passes
from titan_loop.training.metrics import global_means, step_record
from titan_loop.training.metrics_processor import LoopMetricsProcessor
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.stability.non_finite import NonFiniteSteps
from titan_loop.training.stability.recovery import SpikeSkipping
from titan_loop.training.step_plan import StepPlan, step_flops
from titan_loop.training.stop_request import StopListener
from titan_loop.training.verdict import (
    StepVerdict,
    TrainedStep,
    UnreadSteps,
    agree_on_step,
    agree_to_stop,
    first_non_finite_parameter,
    update_unless_skipped,
)


class LoopTrainer(Trainer):
    """Trains a `LoopDecoder`.

    Attributes:
        config: Own copy of the run's config for torchtitan.
        callbacks: Callbacks that the config switches on, then the recipe's, then appended ones.
        window_share: The part of every window that this rank computes; None for all of it.
    """

    Config: TypeAlias = RunConfig

    config: RunConfig
    checkpointer: LoopCheckpointManager
    dataloader: GlobalBatchLoader
    loss_fn: StreamedLoss
    metrics_processor: LoopMetricsProcessor
    model_config: LoopDecoder.Config
    optimizers: LoopOptimizers

    def __init__(self, run: ResolvedRun, layouts: KeptLayouts | None = None) -> None:
        self.run = run
        self._layouts = layouts or KeptLayouts()  # before upstream's constructor, which reads it
        super().__init__(run.for_upstream())
        self.seed = self.config.debug.seed or DEFAULT_SEED
        self.tokens = 0
        self.plan = self._plan(step=1)
        self._plan_to_the_end()
        self.callbacks = [self._skipping(), *self.config.callbacks]
        seq_len = self.config.training.seq_len
        self.window_share = share_of_rank(self.parallel_dims, seq_len, self.device)
        self.passes = self._passes()
        self.stop_listener = StopListener()
        self._unread = UnreadSteps(self._tell)
        self._warned = False
        self._ends_with: Exception | None = None

    @property
    def model(self) -> LoopDecoder:
        """The model; without pipeline parallelism there is only one part."""
        (model,) = self.model_parts
        assert isinstance(model, LoopDecoder)
        return model

    @property
    def at_stage_end(self) -> bool:
        """Whether the run has consumed all its tokens; `training.steps` may end a start earlier."""
        return self.tokens >= self.config.total_tokens

    @property
    def at_last_step(self) -> bool:
        """Whether no step follows the current one in this start."""
        return self.step >= self.last_step

    @property
    def last_step(self) -> int:
        """This start's last step: upstream's loop and save read it where users set a limit."""
        return self.config.training.steps

    @last_step.setter
    def last_step(self, step: int) -> None:
        self.config.training.steps = step

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank heard a signal."""
        return self.stop_listener.requested_by is not None

    def _skipping(self) -> Callback:
        config, asked = self.config, self.config.stability
        if asked.skip_spikes:
            return SpikeSkipping(asked, self.device, RunDirectory(config.dump_folder))
        return NonFiniteSteps(config.max_skipped_steps)

    def _plan(self, step: int) -> StepPlan:
        return self.config.plan_step(
            step=step,
            tokens=self.tokens,
            seed=self.seed,
            rate_start_tokens=self.dataloader.rate_start_tokens,
            deepest=self.dataloader.deepest,
        )

    def _plan_to_the_end(self) -> None:
        self.last_step = self.run.config.last_step(tokens=self.tokens, steps=self.step)

    def _passes(self) -> Passes:
        return Passes(
            model=self.model,
            loss_fn=self.loss_fn,
            loss=self.config.loss,
            columns=self.dataloader.columns,
            window_share=self.window_share,
            parallel_dims=self.parallel_dims,
            device=self.device,
            seed=self.seed,
            prepared=self.post_dataloading_process,
            context=self.train_context,
        )

    def train(self) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
        try:
            super().train()
        finally:
            self.stop_listener.unwatch()
        if self._ends_with is not None:
            raise self._ends_with

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """Start everything that needs the loaded checkpoint; yield nothing: `update` reads data."""
        self._plan_to_the_end()
        if agree_to_stop(self.asked_to_stop, self.device):
            self._stop("before its first step")
            return iter(())
        self.stop_listener.watch(self.config.hang_seconds, self._on_hang)
        if self.at_last_step:
            logger.info("Nothing left to train: the run ended at step %d", self.step)
        for callback in self.callbacks:
            callback.on_train_start(self)
        self.dataloader.log_sources(self.config.windows_of_the_run())
        self.metrics_processor.start(
            step=self.step,
            tokens=self.tokens,
            total_steps=self.last_step,
            compute_dtype=self.config.training.mixed_precision_param,
        )
        return iter(())

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run one step on a whole global batch of the loader; `data_iterator` is not used."""
        self.stop_listener.progress()
        # Before the data is read: the plan sets the number of windows.
        plan = self._plan(self.step)
        if self.dataloader.may_end and self._data_ends(plan.windows):
            return
        for callback in self.callbacks:
            plan = callback.plan(self, plan)
        trained = self.update(plan)
        self._unread.add(trained)
        # Reading the newest verdict waits for the device, so the host reads the previous one,
        # except at steps that are logged or saved: their numbers are needed now.
        due = self.metrics_processor.should_log(self.step) or self._is_saved
        stop = self._unread.read(newest=due)
        self._finish_step(trained)
        # After the callbacks: `_stop` makes this step the last, at which they would evaluate.
        if stop and not self.at_last_step:
            self._stop(f"after step {self.step} of {self.last_step}")

    def update(self, plan: StepPlan) -> TrainedStep:
        """Compute gradients and update the weights, usually without waiting for the device."""
        self.plan = plan
        self.loss_fn.set_schedules(plan.schedules)
        self.optimizers.set_learning_rate(plan.learning_rate)
        self.optimizers.zero_grad()
        began, first_window = time.perf_counter(), self.dataloader.windows_consumed
        batches = self.dataloader.read_step(plan.windows)
        windows = range(first_window, self.dataloader.windows_consumed)
        self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
        loss, metrics = self.passes.forward_backward(plan, batches)
        # Before clipping, which scales the gradients in place.
        for callback in self.callbacks:
            callback.on_gradients(self)
        grad_norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()),
            self.config.training.max_norm,
            foreach=True,
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        # All ranks decide together before the update: else some would step and others not.
        verdict = self._agree(loss, grad_norm)
        # As late as possible: an asynchronous save copies weights while all of the above runs.
        self.checkpointer.maybe_wait_for_staging()
        update_unless_skipped(self.optimizers, verdict)
        # A skipped step has consumed its tokens all the same: schedules and data move on.
        seq_len, trainable = self.config.training.seq_len, self.config.trainable
        self.tokens = plan.tokens + plan.windows * seq_len
        flops = step_flops(self.run.model, plan, seq_len=seq_len, trainable=trainable)
        self.metrics_processor.count_flops(flops)
        loss_mesh = self.parallel_dims.get_optional_mesh("loss")
        self.model.after_update(loss_mesh, verdict.skip == 0)
        self.optimizers.update_average()
        for callback in self.callbacks:
            callback.on_update(self, verdict)
        return TrainedStep(plan.step, windows, loss, metrics, grad_norm, verdict)

    def _agree(self, loss: Tensor, grad_norm: Tensor) -> StepVerdict:
        opinions = [callback.judge(self, loss, grad_norm) for callback in self.callbacks]
        given = [opinion for opinion in opinions if opinion is not None]
        calm = torch.stack(given).all() if given else None
        return agree_on_step(loss, grad_norm, stop=self.asked_to_stop, calm=calm)

    def _tell(self, trained: TrainedStep, updated: bool) -> None:
        for callback in self.callbacks:
            callback.on_verdict(self, trained, updated=updated)

    @property
    def _is_saved(self) -> bool:
        return self.checkpointer.is_due(self.step, last_step=self.at_last_step)

    def _finish_step(self, trained: TrainedStep) -> None:
        record = self._log(trained) if self.metrics_processor.should_log(self.step) else {}
        if self._is_saved and torch.distributed.get_rank() == 0:
            self.dataloader.log_progress(self.step)
        with self.metrics_processor.paused():
            for callback in self.callbacks:
                self.stop_listener.progress()
                callback.on_step_end(self, record)
        self.stop_listener.progress()

    def _log(self, trained: TrainedStep) -> Mapping[str, Any]:
        """Write the step's record and return it; collective, and waits for the device."""
        loss_mesh = self.parallel_dims.get_optional_mesh("loss")
        mean_loss, objective = global_means(trained.loss, trained.metrics, loss_mesh)
        record = self.metrics_processor.log_step(
            step_record(self, trained, mean_loss, objective), self.loss_fn.summary(objective)
        )
        warning = self.loss_fn.warning(objective)
        if warning is not None and not self._warned:  # again only after it has cleared
            warn_together(logger, "step %d: %s", self.step, warning)
        self._warned = warning is not None
        return record

    def _stop(self, where: str) -> None:
        logger.info("Asked to stop: ending %s", where)
        self._end_after_save(
            StoppedError(f"asked to stop, stopped {where}; the same command goes on from there")
        )

    def _data_ends(self, windows: int) -> bool:
        """Return whether any rank has no data for this step, which is then undone; collective.

        It waits for the device: a rank must not start a step that another one cannot take part in.
        """
        began = time.perf_counter()
        reason = self.dataloader.why_it_ends(windows)
        self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
        if not agree_to_stop(reason is not None, self.device):
            return False
        reasons = [each for each in from_all_ranks(all_ranks(), lambda: reason) if each]
        self.step -= 1
        done = f"{reasons[0]}; stopped after step {self.step} of {self.last_step}, "
        done += f"{self.tokens:,} of {self.config.total_tokens:,} tokens"
        fix = f": start again to go on, or end there with total_tokens={self.tokens}"
        self._end_after_save(DataEndedError(done + fix if self.step else done))
        return True

    def _end_after_save(self, error: Exception) -> None:
        """Let upstream's loop save this step as its last; `train` then raises `error`."""
        self._ends_with = error
        self.last_step = self.step

    def _on_hang(self) -> None:
        comm, folder = self.config.comm, RunDirectory(self.config.dump_folder).path
        name = f"{comm.save_traces_file_prefix}{torch.distributed.get_rank()}"
        compat.dump_flight_recorder(folder / comm.save_traces_folder / name)

    def may_save(self) -> bool:
        """Return whether this step may be saved; collective.

        A callback can forbid any step but the last one of a start. Raises `NonFiniteError` rather
        than have non-finite weights saved.
        """
        write_kept()  # a start from this checkpoint will not write these records again
        self._unread.read(newest=True)  # the saved state includes every skipped step
        if not self.at_last_step and not all(each.may_save() for each in self.callbacks):
            return False
        name = first_non_finite_parameter(self.model_parts)
        if name is not None:
            raise NonFiniteError(
                f"parameter {name} is not finite at step {self.step}; nothing was saved, restart "
                "from the last checkpoint"
            )
        return True

    def init_distributed(self) -> ParallelDims:
        """Join the process group, then claim the run directory for this job."""
        with meeting():
            new = super().init_distributed()
        require_equal(all_ranks(), self.run.sha256(), "the resolved config")
        longest_first_step = timedelta(seconds=self.config.comm.init_timeout_seconds)
        parallel_dims = self._layouts.equal_to(new, longest_first_step)
        self.run_lock = on_rank_zero(all_ranks(), RunDirectory(self.config.dump_folder).lock)
        return parallel_dims

    def close(self, *, together: bool = False) -> None:
        """Finish a save that is being written, and release the run directory.

        Everything is closed even if closing some of it fails. Ranks that close `together` leave at
        the same time: a launcher may kill ranks that live much longer than the first one.
        """
        with contextlib.ExitStack() as closing:  # in reverse order, so the lock comes last
            if self.run_lock is not None:
                closing.callback(self.run_lock.release)
            closing.callback(self.checkpointer.close, together=together)
            closing.callback(self.metrics_processor.close)
            closing.callback(give_up_kept)
            closing.callback(self.dataloader.close)

    def lineage(self) -> dict[str, Any]:
        """Return a checkpoint's record of its run: recipe hash, stage, versions."""
        versions, stage = library_versions(), self.config.stage
        return {"recipe_sha256": self.run.recipe_sha256(), "stage": stage, "versions": versions}

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state as JSON, from which any number of ranks can continue."""
        state: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            # The depth at which to use the model; where R is drawn, its mean, rounded and clipped.
            "recurrent_steps": typical_recurrent_steps(self.config.recurrence, self.plan.tokens),
            "architecture": self.run.architecture,
        }
        for callback in self.callbacks:
            state |= callback.state_dict()
        return state

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        """Raise `UserError` if this model cannot start from the weights of a checkpoint."""
        carry = self.config.checkpoint.carry
        check_parent(state_dict["architecture"], self.run.architecture, carry)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; raises `UserError` for another architecture."""
        check_architecture(state_dict["architecture"], self.run.architecture)
        self.step = state_dict["step"]
        self.tokens = state_dict["tokens"]
        for callback in self.callbacks:
            callback.load_state_dict(state_dict)
        self.plan = self._plan(self.step + 1)
