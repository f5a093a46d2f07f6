"""From a global batch to its gradients and the update: micro-batches, forward and backward.

loader.read_step ─► micro-batches ─┬─ columns for the model ─► forward ─┐
└─ columns for the loss ─────────────┴─► loss ─► backward
"""

import time
from typing import Any

import spmd_types as spmd
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from titan_loop.checkpoint.manager import LoopCheckpointManager
from titan_loop.data.columns import LABELLED, columns_for
from titan_loop.data.load.batches import GlobalBatchLoader
from titan_loop.distributed.context_parallel import cut_columns
from titan_loop.distributed.loop_fsdp import reshard_units
from titan_loop.models.context import WindowShare
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import seed_dropout
from titan_loop.objectives.streamed_loss import StreamedLoss
from titan_loop.training.config import RunConfig
from titan_loop.training.learning_rate import TokenLearningRate
from titan_loop.training.metrics import LoopMetricsProcessor
from titan_loop.training.optimizer import LoopOptimizers
from titan_loop.training.stability.guard import Guard
from titan_loop.training.stability.verdict import StepVerdict, update_unless_skipped
from titan_loop.training.step_plan import StepPlan, regime


class GradientTrainer(Trainer):
    """The part of `LoopTrainer` that replaces upstream's forward and backward pass.

    Attributes:
        plan: The training step that is running.
        guard: Watches states.
        seed: Seed of the run.
        window_share: The part of every window this rank computes; None for all of it.
    """

    config: RunConfig
    checkpointer: LoopCheckpointManager
    dataloader: GlobalBatchLoader
    lr_schedulers: TokenLearningRate
    optimizers: LoopOptimizers
    loss_fn: StreamedLoss
    metrics_processor: LoopMetricsProcessor
    plan: StepPlan
    guard: Guard
    seed: int
    window_share: WindowShare | None
    _objective: dict[str, Tensor]  # of the micro-batch just run

    @property
    def _asked_to_stop(self) -> bool:
        """Whether this rank is asked to stop."""
        raise NotImplementedError

    @property
    def model(self) -> LoopDecoder:
        """The one model part there is without pipeline parallelism."""
        (model,) = self.model_parts
        assert isinstance(model, LoopDecoder)
        return model

    def update(self, plan: StepPlan) -> tuple[Tensor, dict[str, Tensor], Tensor, StepVerdict]:
        """Compute a step's gradients and update the weights, without waiting for the device.

        Returns:
            This rank's share of loss and metrics, the gradient norm before clipping, and what all
            ranks agreed on.
        """
        self.plan = plan
        self.loss_fn.set_schedules(plan.schedules)
        self.lr_schedulers.set_tokens(plan.rate_tokens)
        self.optimizers.zero_grad()
        self.guard.begin(plan.step, regime(self.config, plan, level=self.dataloader.level))
        loss, metrics = self.forward_backward(plan)
        self.guard.enter("update")
        with self.guard.measured_update(self.model):
            grad_norm = dist_utils.clip_grad_norm_(
                list(self.model.parameters()), self.config.training.max_norm, foreach=True
            )
            loss_mesh = self.parallel_dims.get_optional_mesh("loss")
            loss_ranks = 1 if loss_mesh is None else loss_mesh.size()
            stop = self._asked_to_stop
            verdict = self.guard.agree(loss, grad_norm, loss_ranks=loss_ranks, stop=stop)
            self.checkpointer.maybe_wait_for_staging()
            update_unless_skipped(self.optimizers, verdict)
        tokens = plan.tokens + plan.windows * self.config.training.seq_len
        self.optimizers.update_average(step=plan.step, tokens=tokens)
        return loss, metrics, grad_norm, verdict

    def forward_backward(self, plan: StepPlan) -> tuple[Tensor, dict[str, Tensor]]:
        """Accumulate a global batch's gradients; return this rank's share of loss and metrics."""
        began = time.perf_counter()
        microbatches = self.dataloader.read_step(plan.windows)
        self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
        self.guard.enter("forward and backward")
        valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in microbatches]).sum()
        valid = self._to_device(valid)
        if self.parallel_dims.dp_enabled:
            valid = dist_utils.dist_sum_tensor(valid, self.parallel_dims.get_mesh("batch"))
        losses: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []
        for number, (input_dict, labels) in enumerate(microbatches):
            seed_dropout(self.model, self.seed, plan.step, number, self._token_rank)
            loss = self.forward_backward_step(
                input_dict={name: self._to_device(value) for name, value in input_dict.items()},
                labels=self._to_device(labels),
                global_valid_tokens=valid,
            )
            losses.append(loss.detach())
            parts.append(self._objective)
        reshard_units(self.model)  # held layers show their gradients only now
        metrics = {
            name: torch.stack([values[name] for values in parts]).sum(dim=0) for name in parts[0]
        }
        return torch.stack(losses).sum(), metrics

    @property
    def _token_rank(self) -> int:
        """Number of this rank among those with other tokens than its own."""
        if not self.parallel_dims.dp_cp_enabled:
            return 0
        return self.parallel_dims.get_mesh("loss").get_local_rank()

    def _to_device(self, value: Tensor) -> Tensor:
        """Copy without waiting; from memory that is not pinned it would wait for all kernels."""
        if self.device.type == "cuda":
            value = value.pin_memory()
        return value.to(self.device, non_blocking=True)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """As upstream's, with the loader's columns; the window is split by ourselves."""
        declared, share = self.dataloader.columns, self.window_share
        columns = {column.name: input_dict.pop(column.name) for column in declared}
        labelled = input_dict.pop(LABELLED, None)
        if share is None:
            inputs, labels, kwargs = super().post_dataloading_process(input_dict, labels)
        else:
            masks = self.model.get_attention_masks(input_dict["positions"], share)
            own = cut_columns({**input_dict, "labels": labels}, share)
            inputs, labels = own["input"], own["labels"]
            kwargs = {"positions": own["positions"], "attention_masks": masks}
            whole = {column.name for column in declared if not column.per_token}
            columns, labelled = cut_columns(columns, share, whole=whole), None
        kwargs["columns"] = columns_for("model", declared, columns)
        kwargs["of_loss"] = {
            "columns": columns_for("loss", declared, columns),
            "labelled_T": labelled,
        }
        return inputs, labels, kwargs

    def _forward_backward_body(
        self,
        inputs: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor,
        extra_kwargs: dict[str, Any],
    ) -> Tensor:
        """As upstream's, but keeps the metrics of the loss, which upstream drops."""
        collect = self.config.loss.collect(exit_gate=self.model.exit_gate is not None)
        kwargs = {**extra_kwargs, "recurrent_steps": self.plan.recurrent_steps, "collect": collect}
        of_loss = kwargs.pop("of_loss")
        self.model.recurrence.backward_steps = self.plan.backward_steps
        with self.train_context():
            with self.guard.watch(self.model):
                output = self.model(inputs, **kwargs)
            loss, metrics = self.loss_fn(output, labels, global_valid_tokens, **of_loss)
            del output
            with spmd.no_typecheck():  # as upstream: the forward pass suffices
                loss.backward()
        self._objective = metrics
        return loss
