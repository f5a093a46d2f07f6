"""From a global batch to its clipped gradients: micro-batches, forward and backward pass.

loader.read_step ─► micro-batches ─┬─ columns for the model ─► forward ─┐
                                   └─ columns for the loss ─────────────┴─► loss ─► backward
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import spmd_types as spmd
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger

from titan_loop.data.columns import LABELLED, columns_for
from titan_loop.data.load.batches import Batch, Position, pinned
from titan_loop.distributed.context_parallel import cut_columns
from titan_loop.distributed.loop_fsdp import reshard_units
from titan_loop.models.context import PREFIX
from titan_loop.models.dropout import seed_dropout
from titan_loop.ranks import warn_together
from titan_loop.training.callback import TrainingState
from titan_loop.training.depth_schedule import most_recurrent_steps


class MicroBatch(NamedTuple):
    """This rank's share of a micro-batch: token ids and labels, (b, L), and further arguments."""

    inputs: Tensor
    labels: Tensor
    for_model: dict[str, Any]
    for_loss: dict[str, Any]


def forward_backward(
    trainer: TrainingState, batches: Sequence[Batch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulate the gradients of this rank's micro-batches of a training step.

    Returns this rank's shares of loss and objective metrics; summed over ranks they are means.
    """
    model, plan = trainer.model, trainer.plan
    # Losses are divided by the valid tokens of the whole global batch, so their sum is its mean.
    valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
    valid = pinned(valid).to(trainer.device, non_blocking=True)
    if trainer.parallel_dims.dp_enabled:
        valid = dist_utils.dist_sum_tensor(valid, trainer.parallel_dims.get_mesh("batch"))
    model.recurrence.backward_steps = plan.backward_steps
    mesh = trainer.parallel_dims.get_optional_mesh("loss")
    token_rank = 0 if mesh is None else mesh.get_local_rank()
    losses: list[Tensor] = []
    parts: list[dict[str, Tensor]] = []
    for number, batch in enumerate(batches):
        seed_dropout(model, trainer.seed, plan.step, number, token_rank)
        steps = plan.recurrent_steps_of(number, len(batches))
        loss, metrics = _one_micro_batch(trainer, batch, valid, steps)
        losses.append(loss)
        parts.append(metrics)
    reshard_units(model)  # layers that stay gathered through a step get their `.grad` here
    # Micro-batches may differ in R: a metric of a step that some did not run is dropped.
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    metrics = {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in shared}
    return torch.stack(losses).sum(), metrics


@structured_logger.log_trace_span("fwd_bwd")
def _one_micro_batch(
    trainer: TrainingState, batch: Batch, valid: Tensor, steps: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Follow upstream's `forward_backward_step`, which would drop the objective's metrics."""
    model = trainer.model
    own = _split(trainer, batch)
    collect = trainer.config.loss.collect(exit_gate=model.exit_gate is not None)
    with trainer.train_context():
        for callback in trainer.callbacks:
            callback.before_forward(trainer)
        output = model(own.inputs, **own.for_model, recurrent_steps=steps, collect=collect)
        for callback in trainer.callbacks:
            callback.after_forward(trainer)
        loss, metrics = trainer.loss_fn(output, own.labels, valid, **own.for_loss)
        del output  # nothing but autograd may keep its states alive in the backward pass
        with spmd.no_typecheck():  # as upstream: checking the forward pass suffices
            loss.backward()
    return loss.detach(), metrics


@torch.no_grad()
def warn_of_float8(trainer: TrainingState, most: float) -> None:
    """Warn if float8 changes the last step's state by more than `most` of its norm; collective.

    It is measured on this rank's next windows, which stay unread, at the largest R of the run.
    """
    from torchtitan.components.quantization.float8 import Float8Linear  # imports torchao

    model, loader = trainer.model, trainer.dataloader
    steps = most_recurrent_steps(trainer.config.recurrence)  # the error grows with R
    ahead = Position(loader.windows_consumed, trainer.plan.windows, loader.data_hash)
    own = _split(trainer, loader.read(ahead).batches[0])
    linears = [part for part in model.modules() if isinstance(part, Float8Linear)]
    states: list[Tensor] = []
    model.eval()  # draws nothing
    for kind in (torch.nn.Linear, Float8Linear):  # in this order: float8 stays
        for part in linears:
            part.__class__ = kind  # has the same weights
        with trainer.train_context():
            output = model(own.inputs, **own.for_model, recurrent_steps=steps, collect="last")
        states.append(output.hidden_RBLD[-1].float())
    model.train()
    sums = torch.stack([(states[1] - states[0]).square().sum(), states[0].square().sum()])
    torch.distributed.all_reduce(sums)
    error = float((sums[0] / sums[1]).sqrt())
    if not error <= most:  # not a number, too
        text = "float8 changes the state after step %d by %.1f %% of its norm, above float8_error="
        text += "%g: use fewer recurrent steps, or --float8 off"
        warn_together(logger, text, steps, 100 * error, most)


def _split(trainer: TrainingState, batch: Batch) -> MicroBatch:
    """Move a micro-batch to the device, and sort it into arguments of the model and of the loss."""
    values = {name: v.to(trainer.device, non_blocking=True) for name, v in batch[0].items()}
    labels = batch[1].to(trainer.device, non_blocking=True)
    declared, share = trainer.dataloader.columns, trainer.window_share
    columns: Mapping[str, Tensor] = {each.name: values.pop(each.name) for each in declared}
    labelled = values.pop(LABELLED, None)
    prefix = columns.get(PREFIX)
    if share is None:
        inputs, labels, for_model = trainer.post_dataloading_process(values, labels)
        if prefix is not None:  # upstream's masks have no prefixes
            masks = trainer.model.get_attention_masks(values["positions"], prefix=prefix)
            for_model["attention_masks"] = masks
    else:
        # The mask is of the whole window: this rank's queries attend to all keys.
        masks = trainer.model.get_attention_masks(values["positions"], share, prefix)
        cut = cut_columns({**values, "labels": labels}, share)
        inputs, labels = cut["input"], cut["labels"]
        for_model = {"positions": cut["positions"], "attention_masks": masks}
        whole = {column.name for column in declared if not column.per_token}
        columns = cut_columns(columns, share, whole=whole)
        labelled = None  # its indices are into whole windows
    for_model["columns"] = columns_for("model", declared, columns)
    loss_columns = dict(columns_for("loss", declared, columns) or {})
    if trainer.config.loss.reads_tokens:
        loss_columns |= {"input": inputs, "positions": for_model["positions"]}
    return MicroBatch(inputs, labels, for_model, {"columns": loss_columns, "labelled_T": labelled})


def clip(trainer: TrainingState) -> Tensor:
    """Scale the gradients to a norm of at most `training.max_norm`; return their norm before."""
    return dist_utils.clip_grad_norm_(
        list(trainer.model.parameters()),
        trainer.config.training.max_norm,
        foreach=True,
        ep_enabled=trainer.parallel_dims.ep_enabled,
    )
