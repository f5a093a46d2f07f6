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
    *units, hidden_elements = _measured(config)
    parameters, gradients = (
        _VALUE_BYTES * sum(_shard_elements(size, shards, tensor_parallel, kind) for size in sizes)
        for sizes, kind in zip(units, ("all", trainable), strict=True)
    )
    of_hidden, of_others = moments
    hidden = _VALUE_BYTES * hidden_elements / (shards * tensor_parallel)
    optimizer = (of_others + averaged) * gradients + (of_hidden - of_others) * hidden
    return StateBytes(parameters, gradients, optimizer)


def unit_sizes(config: LoopDecoder.Config) -> list[UnitSize]:
    """Count the parameters of each FSDP unit from the architecture alone."""
    return _measured(config)[0]


def _shard_elements(
    size: UnitSize, shards: int, tensor_parallel: int, trainable: Trainable
) -> float:
    if size.unit.fp32 or tensor_parallel == 1:
        return size.shard(shards, trainable)
    return size.parameters(trainable) / tensor_parallel / shards


def _measured(config: LoopDecoder.Config) -> tuple[list[UnitSize], list[UnitSize], int]:
    """Return the units, the same without frozen weights, and the elements of matrices of layers."""
    key = repr(config)  # the architecture alone does not say what is frozen
    if key not in _measurements:
        with torch.device("meta"):
            model = config.build()
        hidden = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and model.parameter_group(name, parameter).is_hidden_matrix
        )
        sizes = unit_sizes_of(model, model.units())
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        shapes = [{n: s for n, s in size.shapes.items() if n in trained} for size in sizes]
        learning = [UnitSize(size.unit, own) for size, own in zip(sizes, shapes, strict=True)]
        _measurements[key] = sizes, learning, hidden
    return _measurements[key]


_measurements: dict[str, tuple[list[UnitSize], list[UnitSize], int]] = {}
