"""Costs of a looped decoder, as part of its config: visits of layers and model FLOPs.

Every looped layer counts R times, every readout once. The rest of the convention is torchtitan's:
a multiply-add is two operations, the backward pass costs twice the forward pass, attention counts
as if it were not causal, and recomputation and element-wise work do not count.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torchtitan.models.common.decoder import Decoder

from titan_loop.models.exit_gate import ExitGate, Trainable
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.injection import AdditiveInjection


class Flops(NamedTuple):
    """Forward and backward FLOPs per token; `decoding` is the work of a family between steps."""

    matrices: float
    attention: float
    readouts: float
    gate: float
    decoding: float = 0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


class LayerVisits(NamedTuple):
    """Number of layers that a micro-batch visits; a layer counts as often as it is visited."""

    forward: float
    backward: float


@dataclass(kw_only=True, slots=True)
class DecoderCosts(Decoder.Config):
    """The config fields that determine costs, and the costs; a family may override methods."""

    recurrent_steps: int = 4
    exit_gate: ExitGate.Config | None = None
    norm_placement: NormPlacement = "every_step"
    scale_embeddings: bool = False
    injection: AdditiveInjection.Config | None = None
    prelude_layers: int = 0
    coda_layers: int = 0

    @property
    def looped(self) -> range:
        """Indices of the layers that every step applies; the others run once."""
        return range(self.prelude_layers, len(self.layers) - self.coda_layers)

    @property
    def experts_per_active(self) -> float:
        """Number of experts for each one that acts on a token; 1 without experts."""
        return 1.0

    def idle_parameters(self, *, looped: bool = False) -> int:
        """Return the number of parameters, or looped ones, in experts that a token skips."""
        return 0

    def layer_visits(
        self, recurrent_steps: float, backward_steps: float | None = None
    ) -> LayerVisits:
        """Return the number of layers that a micro-batch visits, forward and backward.

        `backward_steps` is the number of last steps that the backward pass reaches, or its mean; 0
        for a frozen model, None or more than R for all.
        """
        places = self.visits_by_place(recurrent_steps, backward_steps)
        counts = (self.prelude_layers, len(self.looped), self.coda_layers)
        forward, backward = (
            sum(count * visits[way] for count, visits in zip(counts, places, strict=True))
            for way in (0, 1)
        )
        return LayerVisits(forward, backward)

    def visits_by_place(
        self, recurrent_steps: float, backward_steps: float | None = None
    ) -> tuple[LayerVisits, LayerVisits, LayerVisits]:
        """Return the visits of one layer of the prelude, the loop and the coda."""
        reached = min(recurrent_steps, math.inf if backward_steps is None else backward_steps)
        # A coda reads every state that has an exit logit.
        coda = recurrent_steps if self.exit_gate is not None else 1
        return (
            LayerVisits(1, self.reaches_start(recurrent_steps, reached)),
            LayerVisits(recurrent_steps, reached),
            LayerVisits(coda, coda * (reached > 0)),
        )

    def reaches_start(self, recurrent_steps: float, reached: float) -> bool:
        """Return whether a backward pass through the last `reached` steps reaches the embedding."""
        return reached >= recurrent_steps or (reached > 0 and self.injection is not None)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return (parameters, training FLOPs per token at this config's R)."""
        flops = self.training_flops(seq_len, self.recurrent_steps).total
        return sum(p.numel() for p in model.parameters()), int(flops)

    def training_flops(
        self,
        seq_len: int,
        recurrent_steps: float,
        trainable: Trainable = "all",
        backward_steps: float | None = None,
    ) -> Flops:
        """Return forward and backward FLOPs per token.

            (2·forward + 4·backward)·(matrix elements + 2·N·H·L) + 6·readouts·D·V + 6·R·D [gate]

        Without a gate only the last state is read out, else all R. A readout or gate whose input
        needs no gradient costs 4 instead of 6; a coda or norm before it needs the gradient. If only
        the gate trains, readouts cost 2. R and `backward_steps`, the last steps in the backward
        pass (None for all), may be means.
        """
        reached = min(recurrent_steps, backward_steps or recurrent_steps)
        visits = self.layer_visits(recurrent_steps, backward_steps if trainable == "all" else 0)
        layer, gate = self.layers[0], self.exit_gate is not None
        layer_factor = 2 * visits.forward + 4 * visits.backward
        gate_factor = 6 * recurrent_steps
        if self.norm_placement == "every_step" and not self.coda_layers:
            gate_factor -= 2 * (recurrent_steps - reached)
        readout_factor = gate_factor if gate else 6
        if trainable == "exit_gate":
            gate_factor = 4 * recurrent_steps
            readout_factor = 2 * recurrent_steps if gate else 2
        flops = Flops(
            matrices=layer_factor * layer.matrix_elements,
            attention=layer_factor * 2 * layer.attention.widths[0] * seq_len,
            readouts=readout_factor * self.dim * self.vocab_size,
            gate=gate_factor * self.dim if gate else 0,
        )
        return self.own_flops(flops, recurrent_steps, reached if trainable == "all" else 0)

    def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
        """Return `flops` with the computation that a family adds.

        `reached` is the number of steps in the backward pass; 0 if only the gate trains.
        """
        return flops
