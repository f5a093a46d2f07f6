"""From a global batch to its gradients: micro-batches, forward and backward pass.

loader.read_step ─► micro-batches ─┬─ columns for the model ─► forward ─┐
                                   └─ columns for the loss ─────────────┴─► loss ─► backward
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import spmd_types as spmd
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.observability import structured_logger

from titan_loop.data.columns import LABELLED, Column, columns_for
from titan_loop.data.load.batches import Batch, pinned
from titan_loop.distributed.context_parallel import cut_columns
from titan_loop.distributed.loop_fsdp import reshard_units
from titan_loop.models.context import PREFIX, WindowShare
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dropout import seed_dropout
from titan_loop.objectives.streamed_loss import StreamedLoss
from titan_loop.training.step_plan import StepPlan


class MicroBatch(NamedTuple):
    """This rank's share of a micro-batch: token ids and labels, (b, L), and further arguments."""

    inputs: Tensor
    labels: Tensor
    for_model: dict[str, Any]
    for_loss: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The forward and backward passes of a run.

    Attributes:
        prepared: Maps uncut inputs and labels to token ids, labels and the model's arguments.
    """

    model: LoopDecoder
    loss_fn: StreamedLoss
    loss: StreamedLoss.Config
    columns: Sequence[Column]
    window_share: WindowShare | None
    parallel_dims: ParallelDims
    device: torch.device
    seed: int
    prepared: Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
    context: Callable[[], AbstractContextManager[None]]

    def forward_backward(
        self, plan: StepPlan, batches: Sequence[Batch]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Accumulate the gradients of this rank's micro-batches of a training step.

        Returns this rank's shares of loss and objective metrics; summed over ranks they are means.
        """
        # Losses are divided by the valid tokens of the whole global batch, so their sum is its
        # mean.
        valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
        valid = pinned(valid).to(self.device, non_blocking=True)
        if self.parallel_dims.dp_enabled:
            valid = dist_utils.dist_sum_tensor(valid, self.parallel_dims.get_mesh("batch"))
        mesh = self.parallel_dims.get_optional_mesh("loss")
        token_rank = 0 if mesh is None else mesh.get_local_rank()
        losses: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []
        for number, batch in enumerate(batches):
            seed_dropout(self.model, self.seed, plan.step, number, token_rank)
            loss, metrics = self._one_micro_batch(batch, valid, plan)
            losses.append(loss)
            parts.append(metrics)
        reshard_units(self.model)  # layers that stay gathered through a step get their `.grad` here
        metrics = {
            name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]
        }
        return torch.stack(losses).sum(), metrics

    @structured_logger.log_trace_span("fwd_bwd")
    def _one_micro_batch(
        self, batch: Batch, valid: Tensor, plan: StepPlan
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Follow upstream's `forward_backward_step`, which would drop the objective's metrics."""
        own = self._split(batch)
        collect = self.loss.collect(exit_gate=self.model.exit_gate is not None)
        with self.context():
            output = self.model(
                own.inputs,
                **own.for_model,
                recurrent_steps=plan.recurrent_steps,
                backward_steps=plan.backward_steps,
                collect=collect,
            )
            loss, metrics = self.loss_fn(output, own.labels, valid, **own.for_loss)
            del output  # nothing but autograd may keep its states alive in the backward pass
            with spmd.no_typecheck():  # as upstream: checking the forward pass suffices
                loss.backward()
        return loss.detach(), metrics

    def _split(self, batch: Batch) -> MicroBatch:
        """Move a micro-batch to the device, and sort it into the model's and the loss' arguments.

        With a share, the mask is of the whole window: this rank's queries attend to all keys.
        """
        values = {name: v.to(self.device, non_blocking=True) for name, v in batch[0].items()}
        labels = batch[1].to(self.device, non_blocking=True)
        share = self.window_share
        columns: Mapping[str, Tensor] = {each.name: values.pop(each.name) for each in self.columns}
        labelled = values.pop(LABELLED, None)
        prefix = columns.get(PREFIX)
        if share is None:
            inputs, labels, for_model = self.prepared(values, labels)
            if prefix is not None:  # upstream's masks have no prefixes
                masks = self.model.get_attention_masks(values["positions"], prefix=prefix)
                for_model["attention_masks"] = masks
        else:
            masks = self.model.get_attention_masks(values["positions"], share, prefix)
            cut = cut_columns({**values, "labels": labels}, share)
            inputs, labels = cut["input"], cut["labels"]
            for_model = {"positions": cut["positions"], "attention_masks": masks}
            whole = {column.name for column in self.columns if not column.per_token}
            columns = cut_columns(columns, share, whole=whole)
            labelled = None  # its indices are into whole windows
        for_model["columns"] = columns_for("model", self.columns, columns)
        loss_columns = dict(columns_for("loss", self.columns, columns) or {})
        if self.loss.reads_tokens:
            loss_columns |= {"input": inputs, "positions": for_model["positions"]}
        for_loss = {"columns": loss_columns, "labelled_T": labelled}
        return MicroBatch(inputs, labels, for_model, for_loss)
