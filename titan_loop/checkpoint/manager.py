"""Saves, keeps, chooses and loads a run's checkpoints; one without a manifest does not count.

A folder without a valid manifest is never loaded, never counted by the keep policy, and overwritten
when its step comes again. Every checkpoint is full. The state of trainer and loader is JSON inside
the manifest: integers that mean the same on any number of ranks.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from annotated_types import Ge
from torchtitan.components.checkpointer.base import (
    OPTIMIZER,
    TRAIN_STATE,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from titan_loop.checkpoint.choosing import inspect, newest_good
from titan_loop.checkpoint.folders import CHECKPOINTS, discard, set_aside_newer, step_folder
from titan_loop.checkpoint.keep_policy import BEST, Best, KeepPolicy, best_with, delete_stale
from titan_loop.checkpoint.loading import AVERAGE_PREFIX, EXACTLY, KeyPolicy, load_checkpoint
from titan_loop.checkpoint.manifest import Reference, new_content, read_manifest, reference
from titan_loop.checkpoint.remote import RemoteCheckpoints, Uploader
from titan_loop.checkpoint.rewinds import jumped_windows, read_rewinds
from titan_loop.checkpoint.saving import (
    RetryPolicy,
    SaveFailedError,
    own_rank_files,
    save_checkpoint,
    staged,
    stager,
)
from titan_loop.checkpoint.start_from import StartFrom
from titan_loop.checkpoint.trained import Trained, TrainedData, TrainedMoments
from titan_loop.checkpoint.upcycling import upcycle_checkpoint
from titan_loop.errors import UserError
from titan_loop.ranks import from_rank_zero
from titan_loop.storage.remote_folder import check_address

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]

# Every checkpoint of a run repeats these: only the first one names the run's origin as its parent,
# and the keep policy may delete it.
_INHERITED = ("origin", "upcycled")

_LONGEST_END = timedelta(minutes=30)
"""Time that ranks wait for the slowest one to close its files."""


class LoopCheckpointManager(BaseCheckpointManager):
    """Saves, keeps, chooses and loads the checkpoints of one run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """When and how checkpoints are saved, and which ones are kept.

        Attributes:
            folder: Fixed: parents, reports and SLURM jobs look for checkpoints there.
            async_mode: disabled writes in the training thread. Else another thread writes a copy,
                made before training goes on (async) or during the next step (…_with_pinned_mem).
            keep_every: Keep steps that are multiples of this, besides the latest; 0 for none.
            save_attempts: Attempts to save before training goes on without this checkpoint.
            remote: Folder in an object store (s3://…, gs://… or file://…) for copies of all
                checkpoints; a start without a whole local one fetches the newest. Empty for none.
            retry_seconds: Wait before the second attempt; it doubles each time.
            carry: Start of a run that has no checkpoint of its own.
        """

        enable: bool = True
        folder: str = field(init=False, default=CHECKPOINTS)
        async_mode: AsyncMode = "disabled"
        keep_every: Annotated[int, Ge(0)] = 0
        save_attempts: Annotated[int, Ge(1)] = 3
        remote: str = ""
        retry_seconds: Annotated[float, Ge(0)] = 10.0
        carry: StartFrom = field(default_factory=StartFrom)
        # With upstream's default, True, it would warn of settings without an effect.
        last_save_model_only: bool = False
        initial_load_model_only: bool = False

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            self.check()

        def check(self) -> None:
            """Raise `UserError` for unsupported fields of upstream's, and a wrong address."""
            unsupported = {
                "create_seed_checkpoint": "ranks draw the same initial weights by themselves",
                "initial_load_path": "checkpoint.carry.parent names the checkpoint to start from",
                "initial_load_in_hf": "titan-loop convert import makes a checkpoint of it",
                "exclude_from_loading": "a checkpoint is loaded as a whole",
                "last_save_model_only": "every checkpoint is full, so that it can be resumed",
                "last_save_in_hf": "titan-loop convert export writes such folders",
                "folder": f"it is always {CHECKPOINTS!r}",
            }
            for name, reason in unsupported.items():
                if (value := getattr(self, name)) and value != CHECKPOINTS:
                    raise UserError(
                        f"checkpoint.{name}={value} is not supported: {reason}; leave it unset"
                    )
            if self.remote:
                check_address(self.remote, "checkpoint.remote")

        @property
        def keep_policy(self) -> KeepPolicy:
            """The checkpoints that stay, here and in the object store."""
            return KeepPolicy(self.keep_latest_k, self.keep_every)

        @property
        def retry(self) -> RetryPolicy:
            """The attempts at a save, and at a copy in the object store."""
            return RetryPolicy(self.save_attempts, self.retry_seconds)

        def uploader(self, remote: RemoteCheckpoints) -> Uploader:
            """Return the uploader of a run, which must be closed."""
            return Uploader(remote, self.keep_policy, self.retry)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: TrainedData,
        model_parts: list[torch.nn.Module],
        optimizers: TrainedMoments,
        states: dict[str, Any],
        base_folder: str = "",
        **unused: Any,
    ) -> None:
        # `unused`: schedulers (the rate follows from the token count) and an adapter of formats.
        self.config, self.enable = config, config.enable
        self.measured: Best | None = None  # newest held-out loss, set by an evaluation on all ranks
        if not self.enable:
            return
        self.path = Path(base_folder) / CHECKPOINTS
        self.trainer: Trained = states[TRAIN_STATE]
        self.dataloader = dataloader
        self.model = ModelWrapper(model_parts)
        self.optimizers = optimizers
        self.parent: Reference | None = None
        self._last_saved = 0
        self.inherited: dict[str, Any] = {}
        self.best: Best | None = None
        self._best_before: Best | None = None  # to return to if the newest save fails
        # Long: upcycling and writing take time, and a rank that dies is noticed at once anyway.
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.uploader: Uploader | None = None
        self.staging_future: Future[dict[str, Any]] | None = None
        self.save_future: Future[bool] | None = None
        self._stager = None if config.async_mode == "disabled" else stager(config.async_mode)
        device = titan_utils.device_module
        # A thread begins with device 0, where every rank would open a CUDA context.
        self._writer = ThreadPoolExecutor(
            1, "checkpoint", initializer=device.set_device, initargs=(device.current_device(),)
        )

    def copy_to(self, remote: RemoteCheckpoints) -> None:
        """Copy checkpoints as they are committed; on rank 0, once the run directory is locked."""
        self.uploader = self.config.uploader(remote)
        self.uploader.catch_up(self.path)  # copies the last one of a start that was interrupted

    # Saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # A new best is due, too. A running save counts as done, so that evaluations need not wait.
        is_best = best_with(self.best, self.measured, curr_step) is not self.best
        due = is_best or self.is_due(curr_step, last_step=last_step)
        if not due or self.config.load_only or not self.trainer.may_save():
            return False
        self.maybe_wait_for_saving()
        if curr_step == self._last_saved:  # a run whose data ended comes here once more
            return False
        content = new_content(
            curr_step,
            self.trainer.state_dict(),
            stage_end=self.trainer.at_stage_end,
            data=self.dataloader.state_dict(),
            lineage={"parent": self.parent, **self.inherited, **self.trainer.lineage()},
        )
        self._best_before, self.best = self.best, best_with(self.best, self.measured, curr_step)
        if self.best is not None:
            content[BEST] = self.best
        files = own_rank_files(self.group, self.dataloader)
        write = partial(self._write, rank_files=files)
        if self._stager is None or last_step:
            # The last one is waited for in any case: its failure is the run's failure.
            return self._noted(write(self.tensors, content, must_succeed=last_step))
        self.staging_future = staged(self._stager, self.tensors)
        self.save_future = self._writer.submit(write, self.staging_future.result, content)
        return True

    def _noted(self, saved: bool) -> bool:
        if not saved:  # undone in the training thread: on all ranks at the same step
            self.best = self._best_before
        return saved

    def is_due(self, step: int, *, last_step: bool) -> bool:
        """Return whether this step is one to save; a new best is saved besides."""
        first = step == 1 and self.config.enable_first_step_checkpoint
        return first or last_step or step % self.config.interval == 0

    def tensors(self) -> dict[str, Any]:
        """Return the state of model and optimisers that a checkpoint holds."""
        return {OPTIMIZER: self.optimizers.state_dict(), **self.model.state_dict()}

    def _write(
        self,
        state_dict: Callable[[], dict[str, Any]],
        content: dict[str, Any],
        *,
        rank_files: dict[str, bytes],
        must_succeed: bool = False,
    ) -> bool:
        """Write one checkpoint; a failure is logged, and raised only at the end."""
        target = step_folder(self.path, content["step"])
        on_commit = partial(self._committed, target, content["step"])
        settings = {"rank_files": rank_files, "group": self.group, "retry": self.config.retry}
        try:
            with torch.no_grad():
                written = save_checkpoint(
                    target, state_dict, content, on_commit=on_commit, **settings
                )
        except SaveFailedError as error:
            if must_succeed:
                raise
            if dist.get_rank() == 0:
                logger.error("%s. Training goes on; older checkpoints are untouched", error)
            return False
        self._last_saved = content["step"]
        if written is not None:
            self.parent = written
            logger.info("Saved %s", target)
        return True

    def _committed(self, checkpoint: Path, step: int) -> None:
        """Copy a checkpoint just committed, then apply the keep policy; on rank 0."""
        # In this order: the policy spares the checkpoints that wait to be copied.
        if self.uploader is not None:
            self.uploader.submit(checkpoint)
        waits = (lambda path: False) if self.uploader is None else self.uploader.is_uploading
        delete_stale(self.path, self.config.keep_policy, newest=step, in_use=waits)

    # Loading

    def _find_newest(self) -> tuple[int, dict[str, Any]] | None:
        """Choose a checkpoint; if all are damaged, fetch one from the store and choose again."""
        find = partial(newest_good, self.path, look_at="hashes", group=self.group)
        try:
            return find()
        except UserError:
            remote = None if self.uploader is None else self.uploader.remote
            if from_rank_zero(self.group, lambda: remote and remote.fetch_newest()) is None:
                raise
            return find()

    def _load(self, step: int = -1) -> bool:
        # `step` is upstream's `checkpoint.load_step`, which preflight refuses.
        loaded = self._load_weights()
        if rewinds := from_rank_zero(self.group, lambda: read_rewinds(self.path.parent)):
            self.inherited["jumps"] = rewinds
            self.dataloader.jump(jumped_windows(rewinds))
        return loaded

    def _load_weights(self) -> bool:
        found = self._find_newest()
        if found is None and self.config.carry.parent:
            return self._load_parent()
        if found is None:
            logger.info("No checkpoint in %s: starting from scratch", self.path)
            return False
        step, manifest = found
        if dist.get_rank() == 0 and not self.config.load_only:
            set_aside_newer(self.path, step)
        checkpoint = step_folder(self.path, step)
        # First: these two refuse a checkpoint that does not fit before any tensor is read.
        self.trainer.load_state_dict(manifest["trainer"])
        self.dataloader.load_state_dict(manifest["data"])
        self.dataloader.load_rank_files(checkpoint)
        self._read(checkpoint)
        self._last_saved = step
        self.best = manifest.get(BEST)
        lineage = manifest["lineage"]
        self.inherited = {name: lineage[name] for name in _INHERITED if name in lineage}
        if "upcycled" in lineage:
            self.inherited.setdefault("origin", lineage["parent"])
        return True

    def _load_parent(self) -> bool:
        """Start from another run's checkpoint: weights, moments if wanted, nothing else."""
        carry = self.config.carry
        parent = from_rank_zero(self.group, carry.find_parent)
        manifest, reason = inspect(parent, "hashes", group=self.group)
        if manifest is None:
            raise UserError(
                f"checkpoint.carry.parent={parent} is not usable: {reason}; name an older one"
            )
        self.trainer.check_parent(manifest["trainer"])
        self.inherited = {"origin": from_rank_zero(self.group, lambda: reference(parent))}
        if carry.upcycle != "no":
            parent = from_rank_zero(self.group, lambda: self._upcycle(parent))
            # Of this start alone: earlier duplications are in the origin's manifest.
            lineage = from_rank_zero(self.group, lambda: read_manifest(parent)["lineage"])
            self.inherited["upcycled"] = lineage["upcycled"]
        self._read(parent, optimizer=carry.optimizer, policy=carry.key_policy())
        self.optimizers.restart_average()  # the parent's covers the parent's steps
        return True

    def _upcycle(self, parent: Path) -> Path:
        """Return the parent with its layers duplicated, written beside the run's checkpoints."""
        target = self.path.parent / "upcycled"
        n_layers = self.trainer.state_dict()["architecture"]["n_layers"]
        upcycling = self.config.carry.upcycling(n_layers)
        assert upcycling is not None
        discard(target)  # of an attempt that was killed, or of another parent
        logger.info("Upcycling %s to %d layers in %s", parent, n_layers, target)
        upcycle_checkpoint(parent, target, upcycling)
        return target

    def _read(
        self, checkpoint: Path, *, optimizer: bool = True, policy: KeyPolicy = EXACTLY
    ) -> None:
        logger.info("Loading %s", checkpoint)
        state_dict: dict[str, Any] = {**self.model.state_dict()}
        if optimizer:
            state_dict[OPTIMIZER] = self.optimizers
        # A new average starts with the weights; one that is not wanted any more stays unread.
        average = f"{AVERAGE_PREFIX}*"
        policy = KeyPolicy((*policy.ignore_saved, average), (*policy.keep_initial, average))
        with torch.no_grad():
            load_checkpoint(state_dict, checkpoint, group=self.group, policy=policy)
            self.model.load_state_dict(state_dict)
        self.parent = from_rank_zero(self.group, lambda: reference(checkpoint))

    # torchtitan's interface to asynchronous saves

    def _maybe_wait_for_staging(self) -> None:
        if self.staging_future is not None:
            wait([self.staging_future])  # the writer reports its errors
            self.staging_future = None

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        self._maybe_wait_for_staging()
        future, self.save_future = self.save_future, None
        self._noted(future.result())

    def close(self, *, together: bool = False) -> None:
        """Finish all writes; with `together`, wait until every rank has done so.

        A launcher may kill ranks that live much longer than the first one.
        """
        self._together = together
        super().close()

    def _close(self) -> None:
        self._writer.shutdown(wait=True)
        if self.uploader is not None:
            self.uploader.close()
        failure = None if self.save_future is None else self.save_future.exception()
        if failure is not None:
            logger.error("The last asynchronous save failed: %s", failure)
        if self._stager is not None:
            self._stager.close()
        if dist.is_initialized():
            if self._together:
                try:
                    dist.monitored_barrier(self.group, timeout=_LONGEST_END)
                except RuntimeError as error:
                    logger.warning("Not all ranks ended together: %s", error)
            dist.destroy_process_group(self.group)
