"""`LoopTrainer.Config`: every field of a run, with its default and its help.

Nothing is checked here: `preflight` refuses configs, and `resolved_run` derives the fields that
training needs. After that nothing changes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import titan_loop.compat as compat  # before any torchtitan module
from annotated_types import Ge
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import Configurable
from torchtitan.config.configs import (
    CommConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.trainer import Trainer
from tyro.conf import Suppress
from tyro.constructors import PrimitiveConstructorSpec

from titan_loop.bounds import FINITE
from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.data.load.loader import WindowLoader
from titan_loop.distributed.activation_checkpointing import ActivationCheckpointingConfig
from titan_loop.distributed.compiler import LoopCompileConfig
from titan_loop.distributed.float8 import Float8
from titan_loop.distributed.loop_fsdp import FSDPConfig
from titan_loop.models.dense import DenseOptions
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.family import ModelOptions
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.objectives.streamed_loss import StreamedLoss
from titan_loop.training.batch_schedule import (
    BatchConfig,
    batch_sizes,
    global_batch_windows,
    planned,
)
from titan_loop.training.callback import Callback
from titan_loop.training.depth_schedule import RecurrenceConfig, recurrent_steps_at
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.metrics_processor import LoopMetricsProcessor
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.optimizers.container import LoopOptimizers
from titan_loop.training.optimizers.muon import MuonConfig
from titan_loop.training.optimizers.settings import OptimizerSettings
from titan_loop.training.schedule import Schedule
from titan_loop.training.stability.config import StabilityConfig
from titan_loop.training.step_plan import StepPlan
from titan_loop.training.weight_average import WeightAverageConfig

DEFAULT_SEED = 0
OBJECTIVE_SCHEDULES = ("entropy_weight",)
"""Objectives' schedules that are fields of the run; others are fields of an objective's config."""

CLASSES = "classes"
"""Entry of `config.json`: the chosen class by field, for fields that accept several classes."""

TASK_FIELD = "dataloader.task"
"""Key under `CLASSES` for the name of a generated task; null for other data."""

CHOSEN: Mapping[str, tuple[type[Configurable], tuple[str, ...]]] = {
    "dataloader": (GlobalBatchLoader, ("titan_loop.data.load", "titan_loop.rl")),
    "loss": (StreamedLoss, ("titan_loop.objectives", "titan_loop.rl")),
    "activation_checkpoint": (ActivationCheckpointing, ()),
}
"""The other keys of `CLASSES`: field → its base class and the packages with our subclasses."""

DERIVED = ("model_spec", "lr_scheduler", "optimizer.chosen", "optimizer.rest", "optimizer.ema")
"""Fields that `resolve` fills in from others."""

RETIRED: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "accept_change",
            "checkpoint.adopt_remote",
            "ema.interval",
            "ema.start_tokens",
            "optimizer.adamw",
            "optimizer.muon",
            "dataloader.curriculum",
            "activation_checkpoint.save",
            "float8_error",
            "metrics.device_peak_flops",
            "metrics.progress",
            "stability.norms_interval",
            "stability.straggler",
            "stability.heartbeat_seconds",
            "loss.state_distance",
        )
    ),
    "checkpoint.verify_hashes": None,
    "loss.look_ahead": False,
    "model.base_layers": 0,
    "model.early_states": "trained",
    "model.initial_outputs": "zero",
}
"""Fields of earlier versions, which their `config.json` still has, and the value that this version
stands for; None where the value changes no number."""

# tyro would look for flags in the constructors of callbacks.
_NO_FLAGS = PrimitiveConstructorSpec(
    nargs="*",
    metavar="",
    instance_from_str=tuple,
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda callbacks: [repr(callback) for callback in callbacks],
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the representation of functions and most objects


@dataclass(kw_only=True, slots=True)
class NoTokenizer(BaseTokenizer.Config):
    """Takes the place of torchtitan's tokenizer: training reads prepared token ids."""

    def build(self, **unused: Any) -> Any:
        """Build nothing."""


@dataclass(kw_only=True, slots=True)
class TokenLearningRate(LRSchedulersContainer.Config):
    """Takes the place of torchtitan's schedulers: `StepPlan.learning_rate` sets the rate."""

    warmup_steps: int = 0
    schedule: Schedule = field(default_factory=lambda: Schedule.constant(3e-4))

    def build(self, **unused: Any) -> Any:
        """Build nothing: a scheduler would add its own entries to the optimisers' state."""


def _default_training() -> TrainingConfig:
    on_cuda = compat.device_type() == "cuda"
    return TrainingConfig(
        steps=0,
        # bf16 products on a CPU without AMX are about 20 times slower than fp32.
        mixed_precision_param="bfloat16" if on_cuda else "float32",
        disable_cuda_graphs=True,  # preflight says why
    )


@dataclass(kw_only=True, slots=True)
class RunConfig(Trainer.Config):
    """A complete run; every field not marked as derived can be set on the command line."""

    dump_folder: str = "runs/run"
    """The run directory; its layout is described in `titan_loop/runs/run_directory.py`."""

    stage: str = ""
    """Name of the stage in its recipe; recorded in every checkpoint."""

    total_tokens: Annotated[int, Ge(1)] = 1_000_000
    """Number of tokens to train on, all ranks together."""

    total_flops: float | None = None
    """Budget in model FLOPs, all ranks together; the run trains on as many tokens as it pays for.
    total_tokens is then the length that schedules are written for: they are stretched to fit."""

    model: ModelOptions = field(default_factory=DenseOptions)
    trainable: Trainable = "all"
    """"exit_gate" freezes the language model (Ouro's Stage II); needs `AdaptiveGateLoss`."""

    learning_rate: Annotated[Schedule, Ge(0)] = field(
        default_factory=lambda: Schedule.constant(3e-4)
    )
    """Learning rate against global tokens."""

    entropy_weight: Annotated[Schedule, Ge(0)] = field(
        default_factory=lambda: Schedule.constant(0.05)
    )
    """β, the weight of the exit entropy (or of the KL to the prior), against global tokens.
    Steps of an objective without it record 0."""

    recurrence: RecurrenceConfig = field(default_factory=RecurrenceConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: LoopOptimizers.Config = field(default_factory=LoopOptimizers.Config)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    ema: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    best: bool = False
    """Keep the checkpoint with the lowest held-out loss as RUN/checkpoints/best: an evaluation that
    finds a new minimum saves it. The loss is in nats per token at the trained R, averaged over the
    sources with their weights in the mixture."""

    max_skipped_steps: Annotated[int, Ge(1)] = 10
    """Skipped non-finite updates in a row after which the run stops with exit code 3."""

    hang_seconds: Annotated[float, Ge(0), FINITE] = 1800.0
    """Seconds without progress after which a rank writes its stacks and the flight recorder's trace
    and ends with exit code 75. Keep it above the longest step, save or evaluation; 0 is off."""

    comm: CommConfig = field(
        # Longer than `hang_seconds`, whose report says more about the cause.
        default_factory=lambda: CommConfig(init_timeout_seconds=2400, train_timeout_seconds=2400)
    )
    training: TrainingConfig = field(default_factory=_default_training)
    """torchtitan's training settings; `steps` > 0 ends the run early, 0 trains on all of
    `total_tokens`."""

    parallelism: ParallelismConfig = field(
        default_factory=lambda: ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
    )
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    compile: LoopCompileConfig = field(
        default_factory=lambda: LoopCompileConfig(enable=compat.device_type() == "cuda")
    )
    activation_checkpoint: ActivationCheckpointingConfig = None
    float8: Float8 = "off"
    """Recipe for the layers' matrix products in float8; needs torchao, and is emulated without a
    GPU. Embedding, head, exit gate, norms, routers and experts keep their precision."""

    debug: DebugConfig = field(
        default_factory=lambda: DebugConfig(seed=DEFAULT_SEED, enable_structured_logging=False)
    )
    dataloader: GlobalBatchLoader.Config = field(default_factory=WindowLoader.Config)
    metrics: MetricsProcessor.Config = field(default_factory=LoopMetricsProcessor.Config)
    checkpoint: LoopCheckpointManager.Config = field(default_factory=LoopCheckpointManager.Config)
    loss: StreamedLoss.Config = field(default_factory=ExpectedExitLoss.Config)

    callbacks: Suppress[Annotated[tuple[Callback, ...], _NO_FLAGS]] = ()
    """Callbacks of the recipe; recorded in `config.json`, not settable."""

    # Derived by `resolve`, or torchtitan's and unused here: hidden from the command line.
    lr_scheduler: Suppress[LRSchedulersContainer.Config] = field(default_factory=TokenLearningRate)
    tokenizer: Suppress[BaseTokenizer.Config] = field(default_factory=NoTokenizer)
    validator: Suppress[Validator.Config] = field(default_factory=Validator.Config)
    override: Suppress[OverrideConfig] = field(default_factory=OverrideConfig)
    hf_assets_path: Suppress[str] = ""

    def optimizers(self) -> dict[str, OptimizerSettings]:
        """Return the optimisers that `optimizer.name` chooses from, by name: fields of the run."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v for name, v in values.items() if isinstance(v, OptimizerSettings)}

    def open_data(self) -> GlobalBatchLoader:
        """Open the data as one rank would, to find faults early: it reads cards and sizes only."""
        return self.dataloader.build(
            dp_world_size=1, dp_rank=0, seq_len=self.training.seq_len, local_batch_size=1
        )

    def objective_schedules(self) -> dict[str, Schedule]:
        """Return the schedules the objective takes: fields of its own config, or of the run."""
        own = {field.name for field in fields(self.loss)}
        return {
            name: getattr(self.loss if name in own else self, name) for name in self.loss.schedules
        }

    def plan_step(
        self,
        *,
        step: int,
        tokens: int,
        seed: int,
        rate_start_tokens: int = 0,
        deepest: Callable[[int], int] | None = None,
    ) -> StepPlan:
        """Read all schedules for step `step` (the first is 1), after `tokens` global tokens.

        The learning rate's schedule begins at `rate_start_tokens`. `deepest` maps n to the number
        of recurrent steps that the deepest of the next n windows needs.
        """
        recurrence = self.recurrence
        windows = global_batch_windows(self.batch, tokens, self.training.seq_len)
        depth = deepest(windows) if recurrence.from_data and deepest is not None else None
        values = {name: schedule(tokens) for name, schedule in self.objective_schedules().items()}
        return StepPlan(
            step=step,
            tokens=tokens,
            windows=windows,
            recurrent_steps=recurrent_steps_at(
                recurrence, tokens=tokens, step=step, seed=seed, deepest=depth
            ),
            backward_steps=recurrence.backward_steps_at(tokens),
            learning_rate=self.learning_rate(tokens - rate_start_tokens),
            schedules=dict.fromkeys(OBJECTIVE_SCHEDULES, 0.0) | values,
        )

    def last_step(self, *, tokens: int, steps: int) -> int:
        """Return the last training step of a run that has consumed `tokens` in `steps`."""
        seq_len, limit = self.training.seq_len, self.training.steps
        _, last = planned(self.batch, self.total_tokens, seq_len, tokens=tokens, steps=steps)
        return min(last, limit) if limit else last

    def windows_of_the_run(self) -> int:
        """Return the windows that the run consumes; an upper bound if `steps` cuts off a ramp."""
        seq_len, limit = self.training.seq_len, self.training.steps
        windows = planned(self.batch, self.total_tokens, seq_len)[0] // seq_len
        if limit:
            windows = min(windows, limit * max(batch_sizes(self.batch, seq_len, self.total_tokens)))
        return windows

    def windows_needed(self) -> int:
        """Return the windows that the data must have: the run's, plus those that rewinds skip."""
        largest = max(batch_sizes(self.batch, self.training.seq_len, self.total_tokens))
        stability = self.stability
        jumped = stability.skips * stability.rewinds if stability.skip_spikes else 0
        return self.windows_of_the_run() + jumped * largest

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON values that are the same in every process."""
        record = Trainer.Config.to_dict(self)
        task = self.dataloader.generated_task()
        record[CLASSES] = {name: _class_name(getattr(self, name)) for name in CHOSEN}
        record[CLASSES][TASK_FIELD] = None if task is None else task.name
        record["callbacks"] = [_callback_record(callback) for callback in self.callbacks]
        return json.loads(_ADDRESS.sub("", json.dumps(record, default=repr)))


def _class_name(config: Configurable.Config | None) -> str | None:
    # torchtitan notes in `_owner` the class that a config builds.
    return None if config is None else (config._owner or type(config)).__name__


def _callback_record(callback: Callback) -> dict[str, Any]:
    kind = type(callback)
    names = [field.name for field in fields(callback)] if is_dataclass(callback) else []
    values = {name: getattr(callback, name) for name in names}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", **values}
