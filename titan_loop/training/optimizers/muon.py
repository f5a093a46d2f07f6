"""Muon for the matrices of the layers; `titan_loop/distributed/muon.py` computes its update.

With the default scale Muon takes AdamW's rate and decay. `original` needs rates an order of
magnitude larger, which `rate_factor` sets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import titan_loop.compat as compat  # before any torchtitan module
import torch
from annotated_types import Ge, Gt, Le, Lt
from torchtitan.config.configs import ParallelismConfig, TrainingConfig

from titan_loop.bounds import FINITE, Hint
from titan_loop.distributed.muon import Muon
from titan_loop.errors import Refusal
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.optimizers.settings import GroupSettings, OptimizerSettings


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimizerSettings):
    """Muon's settings."""

    title, factory, moments, takes_all = "Muon", Muon, 1, False

    weight_decay: Annotated[float, Ge(0), FINITE] = 0.1
    """Decoupled weight decay."""

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the average of gradients."""

    nesterov: bool = True
    """Whether the update looks one gradient ahead of the average."""

    iterations: Annotated[int, Ge(1), Le(99), Hint("5 is usual")] = 5
    """Newton-Schulz iterations."""

    scale: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor on an update: max(1, √(rows/columns)), or 0.2·√(larger side)."""

    rate_factor: Annotated[float, Gt(0), FINITE] = 1.0
    """Factor on the scheduled learning rate for Muon."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the iteration; auto is bfloat16 on CUDA and float32 on CPU."""

    def settings(self, group: ParameterGroup) -> GroupSettings:
        """Return the settings of one of the model's groups.

        With the factor √(rows/columns) an orthogonal update changes outputs equally at every width.
        0.2·√(larger side) grows by √m at m times the width; the rate undoes that.
        """
        by_width = group.width_ratio**-0.5 if self.scale == "match_rms_adamw" else 1.0
        return self._group(
            self.rate_factor * group.rate_factor * by_width,
            weight_decay=self.weight_decay if group.decays else 0.0,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.iterations,
            adjust_lr_fn=self.scale,
            fused=False,  # Muon ignores `found_inf`; the host reads the verdict first
        )

    def factory_arguments(self) -> dict[str, Any]:
        """Return the type of the iteration on this machine."""
        on_cuda = compat.device_type() == "cuda"
        dtype = ("bfloat16" if on_cuda else "float32") if self.dtype == "auto" else self.dtype
        return {"dtype": getattr(torch, dtype)}

    def refusals(
        self, *, trainable: Trainable, training: TrainingConfig, parallelism: ParallelismConfig
    ) -> Iterator[Refusal]:
        offload, backend = training.enable_cpu_offload, parallelism.spmd_backend
        if trainable == "exit_gate":
            problem = f"has no matrix to update with trainable={trainable}"
            yield Refusal.of("optimizer.name", "muon", problem, "use adamw")
        if offload:
            problem = f"optimizer.name=muon with training.enable_cpu_offload={offload} would "
            problem += "multiply matrices on the host; leave it False, or use adamw"
            yield Refusal("training.enable_cpu_offload", problem)
        if backend != "partial_dtensor":
            problem = f"optimizer.name=muon does not support parallelism.spmd_backend={backend}"
            yield Refusal("parallelism.spmd_backend", problem, "use partial_dtensor, or adamw")
