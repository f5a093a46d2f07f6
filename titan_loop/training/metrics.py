"""The record of a training step.

Its keys, in this order: `step`, `tokens` (global, consumed), `loss`, the objective's metrics,
`grad_norm` (before clipping), `lr` (as scheduled; `lr/muon_x0.5` and the like for parameters that
scale it), `recurrent_steps`, `entropy_weight` and other schedules of the objective,
`global_batch_tokens`, `data_hash`, `windows_consumed`, and for every source `data/NAME/tokens` and
`data/NAME/epochs`, read so far by all ranks; entries of the model and of callbacks. Measured since
the last record: `tokens_per_second` (global), `flops_per_token` (model FLOPs, each step's at its
own R), `mfu` (of the devices' peak at their compute precision; null if that is not known, or layers
are quantised), `peak_memory_bytes` (rank 0: reserved on CUDA, resident on CPU) and `data_wait`
(rank 0: share of the time spent waiting for data). Numbers that are not finite are null.
Add entries to `step_record`, or by `Callback.record`.
"""

from collections.abc import Mapping
from typing import Any

import titan_loop.compat  # noqa: F401 (must come before torchtitan)
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import utils as dist_utils

from titan_loop.training.callback import TrainingState
from titan_loop.training.verdict import TrainedStep


def step_record(
    trainer: TrainingState, trained: TrainedStep, loss: float, objective: Mapping[str, float]
) -> dict[str, Any]:
    """Return a step's record without its measured entries, equal on all ranks; collective.

    `loss` and `objective`, the objective's metrics, are global means.
    """
    plan, loader = trainer.plan, trainer.dataloader
    added = [trainer.model.record(), *(callback.record(trainer) for callback in trainer.callbacks)]
    sources = loader.progress()
    return {
        "step": plan.step,
        "tokens": trainer.tokens,
        "loss": loss,
        **objective,
        "grad_norm": float(trained.grad_norm),
        "lr": plan.learning_rate,
        **trainer.optimizers.own_rates(plan.learning_rate),
        "recurrent_steps": plan.recurrent_steps,
        **plan.schedules,
        "global_batch_tokens": plan.windows * trainer.config.training.seq_len,
        "data_hash": loader.data_hash,
        "windows_consumed": loader.windows_consumed,
        **{f"data/{source.name}/tokens": source.tokens for source in sources},
        **{f"data/{source.name}/epochs": source.epochs for source in sources},
        **dict(item for entries in added for item in entries.items()),
    }


def global_means(
    loss: Tensor, metrics: Mapping[str, Tensor], mesh: DeviceMesh | None
) -> tuple[float, dict[str, float]]:
    """Sum ranks' shares of a step's loss and metrics, scalars, over `mesh` to global means."""
    totals = torch.stack([loss.float(), *(value.float() for value in metrics.values())])
    if mesh is not None:
        totals = dist_utils.dist_sum_tensor(totals, mesh)
    mean_loss, *means = totals.tolist()
    return mean_loss, dict(zip(metrics, means, strict=True))
