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
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import spmd_types as spmd
import titan_loop.compat as compat  # before any torchtitan module
import torch
import tyro
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.cudagraph import cudagraph_teardown
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_loop.checkpoint.architecture import architecture, check_architecture
from titan_loop.checkpoint.carry import check_parent
from titan_loop.checkpoint.lock import claim_run
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.checkpoint.retention import committed_steps
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.loader import WindowLoader
from titan_loop.distributed.activation_checkpointing import (
    ActivationCheckpointingConfig,
    FullOffloadAC,
    check_offloading,
)
from titan_loop.distributed.context_parallel import share_of_rank
from titan_loop.distributed.loop_fsdp import FSDPConfig, reshard_units
from titan_loop.distributed.parallelize import check_parallelism, parallelize_loop_decoder
from titan_loop.errors import NonFiniteError, StoppedError, UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.sizes import ModelOptions, decoder_config
from titan_loop.objectives.expected_loss import ExpectedExitLoss, collapse_warning
from titan_loop.objectives.gate_loss import AdaptiveGateLoss
from titan_loop.objectives.streamed_loss import StreamedLoss
from titan_loop.runs.run_directory import RunDirectory, library_versions
from titan_loop.storage.json_files import finite_or_null
from titan_loop.training.batch_schedule import (
    BatchConfig,
    accumulation_steps,
    batch_sizes,
    plan_steps,
    planned_tokens,
)
from titan_loop.training.callback import Callback
from titan_loop.training.cuda_graphs import check_cuda_graphs
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.learning_rate import AdamWConfig, TokenLearningRate
from titan_loop.training.metrics import LoopMetricsProcessor, StepRecord
from titan_loop.training.prepared_tokens import PreparedTokens
from titan_loop.training.recurrence import (
    RecurrenceConfig,
    fewest_recurrent_steps,
    most_recurrent_steps,
)
from titan_loop.training.schedule import Schedule
from titan_loop.training.stability import (
    SkippedSteps,
    agree_on_step,
    agree_to_stop,
    first_non_finite_parameter,
    update_unless_skipped,
)
from titan_loop.training.startup import FIRST_STEP, StartupClock
from titan_loop.training.step_plan import StepPlan, plan_step
from titan_loop.training.stop_request import StopListener
from titan_loop.training.value_checks import check_values

DEFAULT_SEED = 0
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the representation of functions and most objects


def _default_training() -> TrainingConfig:
    on_cuda = compat.device_type() == "cuda"
    return TrainingConfig(
        steps=0,
        # bf16 products on a CPU without AMX are about 20 times slower than fp32.
        mixed_precision_param="bfloat16" if on_cuda else "float32",
        # Needs a constant R and more: see `titan_loop/training/cuda_graphs.py`.
        disable_cuda_graphs=True,
    )


def _callback_record(callback: Callback) -> dict[str, Any]:
    kind = type(callback)
    values = (
        {field.name: getattr(callback, field.name) for field in fields(callback)}
        if is_dataclass(callback)
        else {}
    )
    return {"class": f"{kind.__module__}.{kind.__qualname__}", **values}


class LoopTrainer(Trainer):
    """Trains a `LoopDecoder`; see the module's docstring for what it adds to torchtitan's trainer.

    Attributes:
        tokens: Global tokens consumed, an integer independent of the number of ranks.
        callbacks: Called around the loop and after every step, in this order.
        window_share: The part of every window this rank computes; None for all of it.
        startup: Measures this start up to its first step; `run_training` brings its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A complete run; every field not marked as derived can be set on the command line."""

        dump_folder: str = "runs/run"
        """The run directory; its layout is described in `titan_loop/runs/run_directory.py`."""

        stage: str = ""
        """Name of the stage in its recipe; recorded in every checkpoint."""

        total_tokens: int = 1_000_000
        """Global tokens to train on."""

        model: ModelOptions = field(default_factory=ModelOptions)
        trainable: Trainable = "all"
        """"exit_gate" freezes the language model (Ouro's Stage II); needs `AdaptiveGateLoss`."""

        learning_rate: Schedule = field(default_factory=lambda: Schedule.constant(3e-4))
        """Learning rate against global tokens."""

        entropy_weight: Schedule = field(default_factory=lambda: Schedule.constant(0.05))
        """β, the weight of the exit entropy (or of the KL to the prior), against global tokens.
        `AdaptiveGateLoss` has none: its steps record 0."""

        recurrence: RecurrenceConfig = field(default_factory=RecurrenceConfig)
        batch: BatchConfig = field(default_factory=BatchConfig)
        adamw: AdamWConfig = field(default_factory=AdamWConfig)
        held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
        suite: SuiteConfig = field(default_factory=SuiteConfig)
        max_skipped_steps: int = 10
        """Skipped non-finite updates in a row after which the run stops with exit code 3."""

        hang_seconds: float = 1800.0
        """A rank without progress for so long leaves its stacks and the flight recorder's trace and
        ends with exit code 75. Longer than any step, save or evaluation takes; 0 is never."""

        comm: CommConfig = field(
            # Longer than `hang_seconds`, which leaves more to find the culprit with.
            default_factory=lambda: CommConfig(
                init_timeout_seconds=2400, train_timeout_seconds=2400
            )
        )
        training: TrainingConfig = field(default_factory=_default_training)
        """Upstream's; `steps` > 0 stops the run early, 0 trains on all of `total_tokens`."""

        parallelism: ParallelismConfig = field(
            default_factory=lambda: ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
        )
        fsdp: FSDPConfig = field(default_factory=FSDPConfig)
        compile: CompileConfig = field(
            default_factory=lambda: CompileConfig(
                enable=compat.device_type() == "cuda", components=["model"]
            )
        )
        activation_checkpoint: ActivationCheckpointingConfig = None
        debug: DebugConfig = field(
            default_factory=lambda: DebugConfig(seed=DEFAULT_SEED, enable_structured_logging=False)
        )
        dataloader: GlobalBatchLoader.Config = field(default_factory=WindowLoader.Config)
        metrics: MetricsProcessor.Config = field(default_factory=LoopMetricsProcessor.Config)
        checkpoint: LoopCheckpointManager.Config = field(
            default_factory=LoopCheckpointManager.Config
        )
        loss: BaseLoss.Config = field(default_factory=ExpectedExitLoss.Config)

        callbacks: Annotated[tuple[Callback, ...], tyro.conf.Suppress] = ()
        """What the recipe wants called; recorded in `config.json`, not settable."""

        # Derived by `resolve`, or not used here: hidden from the command line.
        optimizer: Annotated[OptimizersContainer.Config, tyro.conf.Suppress] = field(
            default_factory=OptimizersContainer.Config
        )
        lr_scheduler: Annotated[LRSchedulersContainer.Config, tyro.conf.Suppress] = field(
            default_factory=TokenLearningRate.Config
        )
        tokenizer: Annotated[BaseTokenizer.Config, tyro.conf.Suppress] = field(
            default_factory=PreparedTokens.Config
        )
        validator: Annotated[Validator.Config, tyro.conf.Suppress] = field(
            default_factory=Validator.Config
        )
        override: Annotated[OverrideConfig, tyro.conf.Suppress] = field(
            default_factory=OverrideConfig
        )
        hf_assets_path: Annotated[str, tyro.conf.Suppress] = ""

        def resolve(self, world_size: int) -> None:
            """Check everything a user can get wrong, and derive what upstream's trainer needs.

            Touches neither a process group nor a device.

            Args:
                world_size: Ranks that will train.

            Raises:
                UserError: One line naming field, value and fix.
            """
            self._check_device()
            self.check_settings()
            shortest = min(self.comm.init_timeout_seconds, self.comm.train_timeout_seconds)
            if self.hang_seconds >= shortest:
                logger.warning(
                    "hang_seconds=%g has no effect on a collective that hangs: it fails after %d "
                    "seconds (comm.init_timeout_seconds, comm.train_timeout_seconds)",
                    self.hang_seconds,
                    shortest,
                )
            model = self._resolve_model()
            self.check_layout(model, world_size)
            self.batch.check(self.training.seq_len)
            model_parallel = (
                self.parallelism.tensor_parallel_degree * self.parallelism.context_parallel_degree
            )
            self._check_batches(world_size // model_parallel)
            self.open_data().require_windows(self.windows_of_the_run())
            self.held_out.check(
                self.dataloader.source_paths(), model.vocab_size, self.training.seq_len
            )
            self.optimizer = self.adamw.optimizer_config(
                exit_gate=self.model.exit_gate, trainable=self.trainable
            )
            self.lr_scheduler = TokenLearningRate.Config(schedule=self.learning_rate)

        def check_settings(self, *, starts_trained: bool | None = None) -> None:
            """Refuse what is wrong on any machine, with any data and any number of ranks.

            Args:
                starts_trained: Whether the run starts from weights that were trained before; None
                    for what `checkpoint.carry.parent` and the run directory say.

            Raises:
                UserError: One line naming field, value and fix.
            """
            check_values(self)
            self.recurrence.check()
            self.loss.build(compile_config=None)  # checks itself
            self._check_trainable()
            self._check_truncation(starts_trained)
            self.checkpoint.check()
            self.held_out.check_settings()
            if self.training.global_batch_size != -1:
                raise UserError(
                    f"training.global_batch_size={self.training.global_batch_size} is not used; "
                    "set --batch.global-batch-tokens"
                )
            if not self.training.disable_cuda_graphs:
                check_cuda_graphs(
                    recurrence=self.recurrence,
                    entropy_weight=self.entropy_weight,
                    fsdp=self.fsdp,
                    moves_to_host=self._offloads_states() or self.training.enable_cpu_offload,
                )

        def _offloads_states(self) -> bool:
            return isinstance(self.activation_checkpoint, FullOffloadAC.Config)

        def _check_device(self) -> None:
            """Refuse what needs a GPU where there is none."""
            if compat.device_type() != "cpu":
                return
            if self.profiler.enable_memory_snapshot:
                raise UserError(
                    "profiler.enable_memory_snapshot=True records CUDA allocations, and there is "
                    "no CUDA; leave it False"
                )
            if self._offloads_states():
                raise UserError(
                    "activation-checkpoint:full-offload moves states from a GPU to the host, and "
                    "there is no GPU; use activation-checkpoint:full"
                )
            if not self.training.disable_cuda_graphs:
                raise UserError(
                    "training.disable_cuda_graphs=False captures kernels of a GPU, and there is "
                    "none; leave it True"
                )

        def check_layout(self, model: LoopDecoder.Config, world_size: int) -> None:
            """Refuse degrees of parallelism that do not fit the model, the window or the ranks.

            Args:
                model: What is trained.
                world_size: Ranks that will train.

            Raises:
                UserError: One line naming field, value and fix.
            """
            attention = model.layers[0].attention
            check_parallelism(
                self.parallelism,
                world_size=world_size,
                n_heads=attention.n_heads,
                n_kv_heads=attention.n_kv_heads or attention.n_heads,
                seq_len=self.training.seq_len,
                attention=self.model.attention,
            )
            self.fsdp.check(self.parallelism)
            check_offloading(self.activation_checkpoint, self.parallelism)

        def open_data(self) -> GlobalBatchLoader:
            """Open the data as one rank would: cards and sizes only, so it finds faults early."""
            return self.dataloader.build(
                dp_world_size=1,
                dp_rank=0,
                seq_len=self.training.seq_len,
                local_batch_size=1,
                tokenizer=None,
                snapshot_every_n_steps=None,
            )

        def to_dict(self) -> dict[str, Any]:
            """Return the config as JSON values that are the same in every process.

            A callback is its class's name and the fields of its dataclass. Functions and other
            objects are their representation, without the address in memory.
            """
            record = Trainer.Config.to_dict(self)
            record["callbacks"] = [_callback_record(callback) for callback in self.callbacks]
            return json.loads(_ADDRESS.sub("", json.dumps(record, default=repr)))

        def recipe_sha256(self) -> str:
            """Return 64 hexadecimal digits for everything but this start's place and length.

            These are `dump_folder`, `checkpoint.carry.parent`, `checkpoint.load_step` and
            `training.steps`. The folders of the training data count.
            """
            record = self.to_dict()
            del record["dump_folder"]
            del record["checkpoint"]["carry"]["parent"]
            del record["checkpoint"]["load_step"]
            del record["training"]["steps"]
            text = json.dumps(finite_or_null(record), sort_keys=True)
            return hashlib.sha256(text.encode()).hexdigest()

        def _resolve_model(self) -> LoopDecoder.Config:
            data = self.dataloader.vocabulary()
            self.open_data()
            if self.model.vocab_size is None:
                self.model.vocab_size = data.size
            model = decoder_config(self.model, max_seq_len=self.training.seq_len)
            if data.largest_token >= model.vocab_size:
                raise UserError(
                    f"model.vocab_size={model.vocab_size} is too small: the data's largest token "
                    f"is {data.largest_token}; use {data.largest_token + 1} or more, or leave it "
                    "unset"
                )
            self.model_spec = ModelSpec(
                name="loop",
                flavor=self.model.size,
                model=model,
                parallelize_fn=partial(
                    parallelize_loop_decoder,
                    fsdp=self.fsdp,
                    trainable=self.trainable,
                    recurrent_steps=most_recurrent_steps(self.recurrence),
                ),
                pipelining_fn=None,
                post_optimizer_build_fn=None,
                state_dict_adapter=None,
            )
            return model

        def windows_of_the_run(self) -> int:
            """Return how many windows the run consumes; at most, if a ramp is cut by `steps`."""
            seq_len, limit = self.training.seq_len, self.training.steps
            windows = planned_tokens(self.batch, self.total_tokens, seq_len) // seq_len
            if limit:
                largest = max(batch_sizes(self.batch, seq_len, self.total_tokens))
                windows = min(windows, limit * largest)
            return windows

        def _check_trainable(self) -> None:
            """Refuse a loss that does not train what is to be trained."""
            if self.trainable not in ("all", "exit_gate"):
                raise UserError(f"trainable={self.trainable}: choose all or exit_gate")
            if not isinstance(self.loss, AdaptiveGateLoss.Config):
                if self.trainable == "exit_gate":
                    raise UserError(
                        f"trainable=exit_gate with loss={type(self.loss).__qualname__}: the gate "
                        "alone learns from AdaptiveGateLoss; set loss to AdaptiveGateLoss.Config()"
                    )
                return
            self.loss.check()
            if self.trainable == "all":
                raise UserError(
                    "trainable=all with loss=AdaptiveGateLoss.Config: this loss has no gradient "
                    "for the language model; set trainable to exit_gate"
                )
            if not self.model.exit_gate:
                raise UserError(
                    "trainable=exit_gate needs a gate, and model.exit_gate=False; set it to True"
                )
            if (fewest := fewest_recurrent_steps(self.recurrence)) < 2:
                raise UserError(
                    f"trainable=exit_gate with recurrence.steps={str(self.recurrence.steps)!r}: R "
                    f"can be {fewest}, and the gate learns from the difference of two steps; keep "
                    "it at 2 or more (recurrence.min_steps=2)"
                )

        def _check_truncation(self, starts_trained: bool | None) -> None:
            """Refuse to leave an embedding as it was drawn; say so where it was trained before."""
            reached = self.recurrence.backward_steps
            fewest = fewest_recurrent_steps(self.recurrence)
            if reached is None or fewest <= reached or self.trainable != "all":
                return
            if self.model.tie_weights:
                return  # trained as the head
            untrained = (
                f"recurrence.backward_steps={reached} never reaches the embedding, which step 1 "
                f"alone reads, and R is {fewest} or more"
            )
            if starts_trained is None:
                checkpoints = RunDirectory(self.dump_folder).checkpoints
                starts_trained = bool(self.checkpoint.carry.parent or committed_steps(checkpoints))
            if starts_trained:
                logger.warning("%s: it stays as it was", untrained)
                return
            raise UserError(
                f"{untrained}; set model.tie_weights=True, a backward_steps that some R does not "
                "exceed, or start from trained weights (checkpoint.carry.parent)"
            )

        def _check_batches(self, data_parallel_ranks: int) -> None:
            """Refuse a batch that some point of the ramp cannot split over the ranks."""
            sizes = batch_sizes(self.batch, self.training.seq_len, self.total_tokens)
            for windows in sizes:
                accumulation_steps(windows, self.training.local_batch_size, data_parallel_ranks)

    config: Config
    dataloader: GlobalBatchLoader
    model_config: LoopDecoder.Config
    loss_fn: StreamedLoss
    lr_schedulers: TokenLearningRate
    metrics_processor: LoopMetricsProcessor

    def __init__(self, config: Config) -> None:
        self._step_limit = config.training.steps
        self._lineage = {
            "recipe_sha256": config.recipe_sha256(),
            "stage": config.stage,
            "versions": library_versions(),
        }
        super().__init__(config)
        self.tokens = 0
        self._plan_to_the_end()
        self.seed = DEFAULT_SEED if config.debug.seed is None else config.debug.seed
        self.skipped = SkippedSteps(config.max_skipped_steps)
        self._objective: dict[str, Tensor] = {}  # of the micro-batch just run
        self._collapse: str | None = None
        self.stop_listener = StopListener()
        self.startup = StartupClock()
        self._stopped_at: str | None = None
        self.callbacks: list[Callback] = [*config.callbacks]
        self.window_share = share_of_rank(self.parallel_dims, config.training.seq_len, self.device)

    @property
    def model(self) -> LoopDecoder:
        """The one model part there is without pipeline parallelism."""
        (model,) = self.model_parts
        assert isinstance(model, LoopDecoder)
        return model

    @property
    def at_stage_end(self) -> bool:
        """Whether the run consumed all it was to train on; `training.steps` may end it earlier."""
        return self.tokens >= self.config.total_tokens

    def _plan_to_the_end(self) -> None:
        """Set `training.steps`, which upstream's loop obeys, from where the run stands now."""
        config = self.config
        steps = plan_steps(
            config.batch,
            config.total_tokens,
            config.training.seq_len,
            tokens=self.tokens,
            steps=self.step,
        )
        config.training.steps = min(steps, self._step_limit) if self._step_limit else steps

    def train(self) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            StoppedError: `stop_listener` heard a signal on some rank; what there was is saved.
        """
        try:
            super().train()
        finally:
            self.stop_listener.unwatch()
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
        self._apply_optimizer_settings()
        if agree_to_stop(self.stop_listener.requested_by is not None, self.device):
            self._stop_here("before its first step")
            return iter(())
        self.stop_listener.watch(self.config.hang_seconds, self._dump_flight_recorder)
        if self.step >= self.config.training.steps:
            logger.info("Nothing left to train: the run ended at step %d", self.step)
        for callback in self.callbacks:
            callback.on_train_start(self)
        self.dataloader.log_sources(self.config.windows_of_the_run())
        self.metrics_processor.start(
            step=self.step, tokens=self.tokens, total_steps=self.config.training.steps
        )
        self.startup.mark("callbacks")
        return iter(())

    def _apply_optimizer_settings(self) -> None:
        """Let this start's config decide: a checkpoint brings its own weight decay and betas."""
        (optimizer,) = self.optimizers
        wanted = self.config.optimizer.param_groups
        for group, settings in zip(optimizer.param_groups, wanted, strict=True):
            group.update(settings.optimizer_kwargs)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run one step on a whole global batch of the loader; `data_iterator` is not used."""
        self.stop_listener.progress()
        plan = plan_step(self.config, step=self.step, tokens=self.tokens, seed=self.seed)
        self.model.recurrent_steps = plan.recurrent_steps
        if isinstance(self.loss_fn, ExpectedExitLoss):
            self.loss_fn.entropy_weight = plan.entropy_weight
        self.lr_schedulers.set_tokens(plan.tokens)
        # A CUDA graph adds to the gradients it was captured with.
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        first_window = self.dataloader.windows_consumed

        loss, metrics = self._forward_backward(plan)
        grad_norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()), self.config.training.max_norm, foreach=True
        )
        verdict = agree_on_step(loss, grad_norm, stop=self.stop_listener.requested_by is not None)
        self.checkpointer.maybe_wait_for_staging()
        update_unless_skipped(self.optimizers, verdict)
        windows = range(first_window, first_window + plan.windows)
        self.skipped.add(verdict, step=plan.step, windows=windows, loss=loss, grad_norm=grad_norm)
        self.tokens += plan.windows * self.config.training.seq_len
        waits = self.metrics_processor.should_log(plan.step) or self._is_saved(plan.step)
        stop = self.skipped.read(newest=waits)
        self._finish_step(plan, loss, grad_norm, metrics)
        if stop and self.step < self.config.training.steps:
            self._stop_here(f"after step {self.step} of {self.config.training.steps}")

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step % self.config.checkpoint.interval == 0 or step == self.config.training.steps

    def _stop_here(self, where: str) -> None:
        """Let upstream's loop save this step as its last; the plan to the end is made again."""
        self._stopped_at = where
        logger.info("Asked to stop: saving, and leaving %s", where)
        self.config.training.steps = self.step

    def _dump_flight_recorder(self) -> None:
        """Write what this rank's process groups did last, for `torchfrtrace`."""
        comm = self.config.comm
        folder = Path(self.config.dump_folder) / comm.save_traces_folder
        rank = torch.distributed.get_rank()
        compat.dump_flight_recorder(folder / f"{comm.save_traces_file_prefix}{rank}")

    def _forward_backward(self, plan: StepPlan) -> tuple[Tensor, dict[str, Tensor]]:
        """Accumulate the gradients of one global batch.

        Returns:
            This rank's share of the loss and of the objective's metrics: sums over ranks are global
            means.
        """
        began = time.perf_counter()
        microbatches = self.dataloader.read_step(plan.windows)
        self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
        valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in microbatches]).sum()
        valid = self._to_device(valid)
        if self.parallel_dims.dp_enabled:
            valid = dist_utils.dist_sum_tensor(valid, self.parallel_dims.get_mesh("batch"))
        losses: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []
        for input_dict, labels in microbatches:
            loss = self.forward_backward_step(
                input_dict={name: self._to_device(value) for name, value in input_dict.items()},
                labels=self._to_device(labels),
                global_valid_tokens=valid,
            )
            # Copies: a CUDA graph writes the next micro-batch's values over these.
            losses.append(loss.detach().clone())
            parts.append({name: value.clone() for name, value in self._objective.items()})
        reshard_units(self.model)  # held layers show their gradients only now
        metrics = {
            name: torch.stack([values[name] for values in parts]).sum(dim=0) for name in parts[0]
        }
        return torch.stack(losses).sum(), metrics

    def _to_device(self, value: Tensor) -> Tensor:
        """Copy without waiting; from memory that is not pinned it would wait for all kernels."""
        if self.device.type == "cuda":
            value = value.pin_memory()
        return value.to(self.device, non_blocking=True)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """As upstream's; under context parallelism our own split of the window."""
        share = self.window_share
        if share is None:
            return super().post_dataloading_process(input_dict, labels)
        positions = input_dict["positions"]
        masks = self.model.get_attention_masks(positions, share)
        mine = share.queries_L
        labels = labels[:, mine]
        self.ntokens_seen += labels.numel()
        return (
            input_dict["input"][:, mine],
            labels,
            {"positions": positions[:, mine], "attention_masks": masks},
        )

    def _forward_backward_body(
        self,
        inputs: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor,
        extra_kwargs: dict[str, Any],
    ) -> Tensor:
        """As upstream's, but keeps the metrics of the loss, which upstream drops."""
        with self.train_context():
            output = self.model_parts[0](inputs, **extra_kwargs)
            loss, metrics = self.loss_fn(output, labels, global_valid_tokens)
            del output
            with spmd.no_typecheck():  # as upstream: the forward pass suffices
                loss.backward()
        self._objective = metrics
        return loss

    def _finish_step(
        self,
        plan: StepPlan,
        loss: Tensor,
        grad_norm: Tensor,
        metrics: dict[str, Tensor],
    ) -> None:
        record: Mapping[str, Any] = {}
        if self.metrics_processor.should_log(plan.step):
            names = list(metrics)
            totals = torch.stack([loss.float(), *(metrics[name].float() for name in names)])
            loss_mesh = self.parallel_dims.get_optional_mesh("loss")
            if loss_mesh is not None:
                totals = dist_utils.dist_sum_tensor(totals, loss_mesh)
            mean_loss, *means = totals.tolist()
            objective = dict(zip(names, means, strict=True))
            seq_len = self.config.training.seq_len
            record = self.metrics_processor.log_step(
                StepRecord(
                    step=plan.step,
                    total_steps=self.config.training.steps,
                    tokens=self.tokens,
                    loss=mean_loss,
                    grad_norm=float(grad_norm),
                    lr=plan.learning_rate,
                    recurrent_steps=plan.recurrent_steps,
                    entropy_weight=plan.entropy_weight,
                    global_batch_tokens=plan.windows * seq_len,
                    data_hash=self.dataloader.data_hash,
                    windows_consumed=self.dataloader.windows_consumed,
                    sources=self.dataloader.progress(),
                    objective=objective,
                    flops_per_token=int(
                        self.model_config.training_flops(
                            seq_len,
                            plan.recurrent_steps,
                            self.config.trainable,
                            self.config.recurrence.backward_steps,
                        ).total
                    ),
                )
            )
            self._warn_of_collapse(objective)
        self._report_startup()
        self._report_sources(plan.step)
        with self.metrics_processor.paused():
            for callback in self.callbacks:
                self.stop_listener.progress()
                callback.on_step_end(self, record)
        self.stop_listener.progress()

    def _report_startup(self) -> None:
        """After the first step, say what the time before its end went into."""
        if self.startup.finished:
            return
        self.startup.mark(FIRST_STEP)
        run_directory = self.metrics_processor.run_directory
        if torch.distributed.get_rank() == 0 and run_directory.run_json.exists():
            logger.info("%s", self.startup.line())
            run_directory.record_startup(self.startup.seconds)

    def _report_sources(self, step: int) -> None:
        """Say how far every source was read, when a checkpoint is due and at the end."""
        progress = self.dataloader.progress()
        if self._is_saved(step) and progress and torch.distributed.get_rank() == 0:
            sources = ", ".join(f"{s.name} {s.tokens} ({s.epochs:.3f} epochs)" for s in progress)
            logger.info("tokens read by step %d: %s", step, sources)

    def _warn_of_collapse(self, objective: Mapping[str, float]) -> None:
        """Warn when the exit distribution collapses, and not again until it has recovered."""
        if not isinstance(self.loss_fn, ExpectedExitLoss):
            return  # a frozen model cannot collapse: a gate that always exits late may be right
        warning = collapse_warning(objective)
        if warning is not None and self._collapse is None:
            logger.warning("step %d: %s", self.step, warning)
        self._collapse = warning

    def before_save(self) -> None:
        """Refuse to save weights that are not finite; collective."""
        name = first_non_finite_parameter(self.model_parts)
        if name is not None:
            raise NonFiniteError(
                f"parameter {name} is not finite at step {self.step}; nothing was saved, restart "
                "from the last checkpoint"
            )

    def init_distributed(self) -> ParallelDims:
        """Join the process group, then claim the run directory for this job."""
        parallel_dims = super().init_distributed()
        self.run_lock = claim_run(Path(self.config.dump_folder))
        return parallel_dims

    def close(self) -> None:
        """Wait for a save that is being written, and let another job have the run directory.

        Everything is closed even if closing some of it fails, unlike in upstream's `close`, whose
        parts these are; the lock comes last.
        """
        with contextlib.ExitStack() as closing:
            if self.run_lock is not None:
                closing.callback(self.run_lock.release)
            closing.callback(cudagraph_teardown)  # nothing to do without one
            closing.callback(self.metrics_processor.close)
            closing.callback(self.checkpointer.close)
            closing.callback(self.dataloader.close)

    def lineage(self) -> dict[str, Any]:
        """Return what a checkpoint records of its run: recipe hash, stage, versions."""
        return self._lineage

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the run, as JSON that means the same on any number of ranks."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "recurrent_steps": max(1, round(self.config.recurrence.steps(self.tokens))),
            "architecture": architecture(self.model_config),
        }

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        """Raise `UserError` if this model cannot start from the weights of such a state."""
        check_parent(
            state_dict["architecture"],
            architecture(self.model_config),
            self.config.checkpoint.carry,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            UserError: The checkpoint is of another architecture; R may differ.
        """
        check_architecture(state_dict["architecture"], architecture(self.model_config))
        self.step = state_dict["step"]
        self.tokens = state_dict["tokens"]
