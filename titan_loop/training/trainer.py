"""`LoopTrainer`: torchtitan's trainer with token schedules, loop metrics and safe updates.

One training step:

    plan_step(tokens) ─► R, β, learning rate, windows
    loader.read_step ─► micro-batches ─► forward, backward (upstream) ─► gradient norm
    finite on every rank? ─► update, or skip and count ─► metrics, callbacks
    any rank asked to stop? ─► save and leave

Everything scheduled is a pure function of the global token count, an integer that does not depend
on how many ranks there are. Meshes, model building, parallelisms, profiling and the outer loop are
upstream's.
"""

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import titan_loop.compat as compat  # before any torchtitan module
import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.best import Best
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.start_from import check_parent
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.distributed.kept_layouts import kept_layout
from titan_loop.errors import NonFiniteError, StoppedError, UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.ranks import all_ranks, meeting, on_rank_zero, require_equal, warn_together
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.kept_records import give_up_kept, write_kept
from titan_loop.training.batch_schedule import plan_steps
from titan_loop.training.callback import Callback
from titan_loop.training.config import DEFAULT_SEED, RunConfig
from titan_loop.training.gradients import GradientTrainer
from titan_loop.training.learning_rate import TokenLearningRate
from titan_loop.training.lost_folder import FolderWatch, follow_folder
from titan_loop.training.metrics import StepRecord, global_means
from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.recurrence import most_recurrent_steps
from titan_loop.training.resolved_run import ResolvedRun
from titan_loop.training.stability.guard import Guard
from titan_loop.training.stability.verdict import (
    StepVerdict,
    agree_to_stop,
    first_non_finite_parameter,
)
from titan_loop.training.startup import StartupClock
from titan_loop.training.step_plan import (
    StepPlan,
    plan_step,
    step_flops,
    trained_recurrence,
)
from titan_loop.training.stop_request import StopListener


class LoopTrainer(GradientTrainer):
    """Trains a `LoopDecoder`; see the module's docstring for what it adds to torchtitan's trainer.

    Args:
        run: What to train, from `resolve`.

    Attributes:
        run: As given.
        config: torchtitan's copy of its config: `training.steps` moves with the plan to the end.
        tokens: Global tokens consumed, an integer independent of the number of ranks.
        plan: The newest training step's; before the first, that of the next.
        callbacks: Called around the loop and after every step, in this order.
        window_share: The part of every window this rank computes; None for all of it.
        startup: Measures this start up to its first step; `run_training` brings its own.
    """

    Config: TypeAlias = RunConfig

    checkpointer: LoopCheckpointManager
    model_config: LoopDecoder.Config
    lr_schedulers: TokenLearningRate
    optimizers: LoopOptimizers

    def __init__(self, run: ResolvedRun) -> None:
        self.run = run
        super().__init__(run.for_upstream())
        config = run.config
        self.seed = DEFAULT_SEED if config.debug.seed is None else config.debug.seed
        self.tokens = 0
        self.guard = Guard(
            config.stability,
            model=run.model,
            recurrent_steps=most_recurrent_steps(config.recurrence),
            device=self.device,
            window_tokens=config.training.seq_len,
            run=self.metrics_processor.run_directory,
            writes=torch.distributed.get_rank() == 0,
            max_skipped_steps=config.max_skipped_steps,
        )
        self.plan = self._plan(step=1)
        self._plan_to_the_end()
        self.callbacks: list[Callback] = [*config.callbacks]
        self.window_share = share_of_rank(self.parallel_dims, config.training.seq_len, self.device)
        self.stop_listener = StopListener()
        self.startup = StartupClock()
        self._measured: Best | None = None
        self._warning: str | None = None
        self._stopped_at: str | None = None
        self._lost: UserError | None = None
        self._folder_watch: FolderWatch | None = None

    @property
    def at_stage_end(self) -> bool:
        """Whether the run consumed all it was to train on; `training.steps` may end it earlier."""
        return self.tokens >= self.run.config.total_tokens

    @property
    def at_last_step(self) -> bool:
        """Whether this start trains no further step."""
        return self.step >= self.config.training.steps

    @property
    def held_back(self) -> bool:
        """Whether the step just done must not be saved; the last step of a start always is."""
        return self.guard.held_back and not self.at_last_step

    @property
    def recurrent_steps(self) -> int:
        """R of the newest training step; before the first, that of the next."""
        return self.plan.recurrent_steps

    def _plan(self, step: int) -> StepPlan:
        return plan_step(
            self.run.config,
            step=step,
            tokens=self.tokens,
            seed=self.seed,
            rate_start_tokens=self.dataloader.rate_start_tokens,
            deepest=self.dataloader.deepest,
        )

    def _plan_to_the_end(self) -> None:
        """Set `training.steps`, which upstream's loop obeys, from where the run stands now."""
        config, limit = self.run.config, self.run.config.training.steps
        steps = plan_steps(
            config.batch,
            config.total_tokens,
            config.training.seq_len,
            tokens=self.tokens,
            steps=self.step,
        )
        self.config.training.steps = min(steps, limit) if limit else steps

    def train(self) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            StoppedError: `stop_listener` heard a signal on some rank; what there was is saved.
        """
        try:
            super().train()
        finally:
            self.stop_listener.unwatch()
            if self._folder_watch is not None:
                self._folder_watch.end()
        if self._lost is not None:
            raise self._lost
        if self._stopped_at is not None:
            raise StoppedError(
                f"asked to stop, stopped {self._stopped_at}; the same command goes on from there"
            )
        for callback in self.callbacks:
            callback.on_train_end(self)

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """Start callbacks and clock, now that a checkpoint is loaded; steps read their own data."""
        self.startup.mark("checkpoint")
        self._plan_to_the_end()
        self.optimizers.apply_settings()  # which a checkpoint brings as it was saved
        if self.run_lock is not None:
            self._folder_watch = FolderWatch(self.run_lock)
        if agree_to_stop(self._asked_to_stop, self.device):
            self._stop_here("before its first step")
            return iter(())
        comm, rank = self.config.comm, torch.distributed.get_rank()
        traces = Path(self.config.dump_folder) / comm.save_traces_folder
        trace = traces / f"{comm.save_traces_file_prefix}{rank}"
        self.stop_listener.watch(
            self.run.config.hang_seconds,
            lambda: (self.guard.name_silent_ranks(), compat.dump_flight_recorder(trace)),
        )
        if self.at_last_step:
            logger.info("Nothing left to train: the run ended at step %d", self.step)
        for callback in self.callbacks:
            callback.on_train_start(self)
        self.dataloader.log_sources(self.run.config.windows_of_the_run())
        self.metrics_processor.start(
            step=self.step,
            tokens=self.tokens,
            total_steps=self.config.training.steps,
            compute_dtype=self.config.training.mixed_precision_param,
        )
        self.startup.mark("callbacks")
        return iter(())

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run one step on a whole global batch of the loader; `data_iterator` is not used."""
        self.stop_listener.progress()
        plan, first_window = self._plan(self.step), self.dataloader.windows_consumed
        loss, metrics, grad_norm, verdict = self.update(plan)
        windows = range(first_window, self.dataloader.windows_consumed)
        self.guard.skipped.add(
            verdict, step=plan.step, windows=windows, loss=loss, grad_norm=grad_norm
        )
        self.tokens += plan.windows * self.config.training.seq_len
        self.metrics_processor.count_flops(step_flops(self.run.config, self.run.model, plan))
        waits = self.metrics_processor.should_log(plan.step) or self._is_saved(plan.step)
        stop = self.guard.skipped.read(newest=waits)
        if stop and self._follow_folder():
            return
        self._finish_step(loss, grad_norm, metrics, verdict)
        if stop and not self.at_last_step:
            self._stop_here(f"after step {self.step} of {self.config.training.steps}")

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step % self.config.checkpoint.interval == 0 or step == self.config.training.steps

    def _stop_here(self, where: str) -> None:
        """Let upstream's loop save this step as its last; the plan to the end is made again."""
        self._stopped_at = where
        logger.info("Asked to stop: saving, and leaving %s", where)
        self.config.training.steps = self.step

    def _finish_step(
        self, loss: Tensor, grad_norm: Tensor, metrics: dict[str, Tensor], verdict: StepVerdict
    ) -> None:
        """Log the step if that is due, and call the callbacks."""
        plan = self.plan
        self.guard.enter("log")
        record: Mapping[str, Any] = {}
        if self.metrics_processor.should_log(plan.step):
            loss_mesh = self.parallel_dims.get_optional_mesh("loss")
            mean_loss, objective = global_means(loss, metrics, loss_mesh)
            record = self.metrics_processor.log_step(
                StepRecord(
                    step=plan.step,
                    total_steps=self.config.training.steps,
                    tokens=self.tokens,
                    loss=mean_loss,
                    grad_norm=float(grad_norm),
                    lr=plan.learning_rate,
                    own_rates=self.optimizers.own_rates(plan.learning_rate),
                    recurrent_steps=plan.recurrent_steps,
                    schedules=plan.schedules,
                    global_batch_tokens=plan.windows * self.config.training.seq_len,
                    data_hash=self.dataloader.data_hash,
                    windows_consumed=self.dataloader.windows_consumed,
                    sources=self.dataloader.progress(),
                    objective=objective,
                    summary=self.loss_fn.summary(objective),
                    io_retries=verdict.io_retries,
                    ranks=self.guard.rank_times(self.metrics_processor.data_loading_times),
                )
            )
            self._warn(objective)
        self.guard.log(
            step=plan.step,
            tokens=self.tokens,
            recurrent_steps=plan.recurrent_steps,
            windows=plan.windows,
        )
        self.startup.finish(self.metrics_processor.run_directory)
        if self._is_saved(plan.step) and torch.distributed.get_rank() == 0:
            self.dataloader.log_progress(plan.step)
        self.guard.enter("callbacks")
        with self.metrics_processor.paused():
            for callback in self.callbacks:
                self.stop_listener.progress()
                callback.on_step_end(self, record)
        self.guard.enter("checkpoint")
        self.stop_listener.progress()

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """Pass on what the objective warns of, and not again until it has stopped to."""
        warning = self.loss_fn.warning(metrics)
        if warning is not None and self._warning is None:
            warn_together(logger, "step %d: %s", self.step, warning)
        self._warning = warning

    @property
    def _asked_to_stop(self) -> bool:
        """Whether a signal, or the loss of the run's folder, asks this rank to stop."""
        lost = self._folder_watch is not None and self._folder_watch.lost
        return lost or self.stop_listener.requested_by is not None

    def _follow_folder(self) -> bool:
        """Return whether the folder was lost; then the loop saves this step, and ends."""
        self._lost = self._lost or follow_folder(self.run_lock, self.checkpointer)
        if self._lost is not None:
            self.config.training.steps = self.step
        return self._lost is not None

    def note_held_out_loss(self, nats_per_token: float, measured_on: str) -> None:
        """Take the held-out loss of the weights after this step (see `TrainingState`)."""
        self._measured = Best(step=self.step, held_out_loss=nats_per_token, measured_on=measured_on)

    @property
    def measured(self) -> Best | None:
        """Held-out loss of the weights as they are (see `TrainState`)."""
        measured = self._measured
        return measured if measured is not None and measured["step"] == self.step else None

    def before_save(self) -> None:
        """Refuse to save weights that are not finite, or in another run's folder; collective."""
        self._follow_folder()
        write_kept()  # no later start repeats the steps before a checkpoint
        self.guard.read_before_save()
        name = first_non_finite_parameter(self.model_parts)
        if name is not None:
            raise NonFiniteError(
                f"parameter {name} is not finite at step {self.step}; nothing was saved, restart "
                "from the last checkpoint"
            )

    def init_distributed(self) -> ParallelDims:
        """Join the process group, then claim the run directory for this job."""
        with meeting():
            new = super().init_distributed()
        require_equal(all_ranks(), self.run.sha256(), "the resolved config")
        longest_first_step = timedelta(seconds=self.config.comm.init_timeout_seconds)
        parallel_dims = kept_layout(new, longest_first_step)
        self.run_lock = on_rank_zero(all_ranks(), RunDirectory(self.config.dump_folder).lock)
        return parallel_dims

    def close(self, *, together: bool = False) -> None:
        """Wait for a save that is being written, and let another job have the run directory.

        Everything is closed even if closing some of it fails, unlike in upstream's `close`, whose
        parts these are; the lock comes last.

        Args:
            together: Whether all ranks close now. They then leave at the same time: a launcher may
                kill those that take much longer than the first, such as rank 0 in a slow upload.
        """
        self.checkpointer.ends_together = together
        with contextlib.ExitStack() as closing:
            if self.run_lock is not None:
                closing.callback(self.run_lock.release)
            closing.callback(self.checkpointer.close)
            closing.callback(self.metrics_processor.close)
            closing.callback(give_up_kept)
            closing.callback(self.dataloader.close)
            closing.callback(self.guard.close)

    def lineage(self) -> dict[str, Any]:
        """Return what a checkpoint records of its run: recipe hash, stage, versions."""
        return self.run.lineage()

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the run, as JSON that means the same on any number of ranks."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            **trained_recurrence(self.run.config.recurrence, self.plan),
            "architecture": self.run.architecture,
            **self.guard.state_dict(),
        }

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        """Raise `UserError` if this model cannot start from the weights of such a state."""
        carry = self.run.config.checkpoint.carry
        check_parent(state_dict["architecture"], self.run.architecture, carry)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            UserError: The checkpoint is of another architecture; R may differ.
        """
        check_architecture(state_dict["architecture"], self.run.architecture)
        self.step = state_dict["step"]
        self.tokens = state_dict["tokens"]
        self.guard.load_state_dict(state_dict)
        self.plan = self._plan(self.step + 1)
