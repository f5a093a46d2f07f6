"""Bytes of weights, gradients and optimizer moments on one rank, from the config alone.

    parameters  4·P/S   gradients  4·P/S   AdamW's moments  8·P/S   an average of the weights  4·P/S

P parameters, with FSDP's padding, on S ranks. Muon keeps one moment of the layers' matrices instead
of two. The rehearsal in `titan_loop/planning` measures activations, peaks and collectives.
"""

from typing import NamedTuple

import torch

from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.units import UnitSize, unit_sizes_of

_VALUE_BYTES = 4  # of parameters, gradients and each moment


class StateBytes(NamedTuple):
    """Bytes that one rank holds from step to step, in fp32; `optimizer` includes the average."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the three."""
        return sum(self)


def state_bytes(
    config: LoopDecoder.Config,
    *,
    shards: int,
    tensor_parallel: int = 1,
    trainable: Trainable = "all",
    moments: tuple[int, int] = (2, 2),
    averaged: bool = False,
) -> StateBytes:
    """Return the bytes of one rank's share; `shards` is FSDP's degree, not counting replicas.

    The optimiser keeps `moments` for a weight of the layers' matrices, and for another weight.
    """
    model = _without_memory(config)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [
        p for name, p in learning.items() if model.parameter_group(name, p).is_hidden_matrix
    ]

    def share(size: UnitSize, kind: Trainable) -> float:
        if size.unit.fp32 or tensor_parallel == 1:
            return size.shard(shards, kind)
        return size.parameters(kind) / tensor_parallel / shards

    parameters = gradients = 0.0
    for size in unit_sizes_of(model, model.units()):
        own = {name: shape for name, shape in size.shapes.items() if name in learning}
        parameters += _VALUE_BYTES * share(size, "all")
        gradients += _VALUE_BYTES * share(UnitSize(size.unit, own), trainable)
    of_hidden, of_others = moments
    hidden = _VALUE_BYTES * sum(p.numel() for p in matrices) / (shards * tensor_parallel)
    optimizer = (of_others + averaged) * gradients + (of_hidden - of_others) * hidden
    return StateBytes(parameters, gradients, optimizer)


def unit_sizes(config: LoopDecoder.Config) -> list[UnitSize]:
    """Count the parameters of each FSDP unit from the architecture alone."""
    model = _without_memory(config)
    return unit_sizes_of(model, model.units())


def _without_memory(config: LoopDecoder.Config) -> LoopDecoder:
    with torch.device("meta"):
        return config.build()
