"""Costs of a looped decoder: visits of layers and FLOPs.

The part of a decoder's config that these follow from. A family whose forward pass differs overrides
the methods.
"""

import math
from dataclasses import dataclass

from torch import nn
from torchtitan.models.common.decoder import Decoder

from titan_loop.models.exit_gate import ExitGate, Trainable
from titan_loop.models.final_norm import NormPlacement
from titan_loop.models.flops import Flops, LayerVisits, training_flops_per_token
from titan_loop.models.injection import AdditiveInjection


@dataclass(kw_only=True, slots=True)
class DecoderCosts(Decoder.Config):
    """The number of looped layers, and the further computation of every step."""

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

    def layer_visits(
        self, recurrent_steps: float, backward_steps: float | None = None
    ) -> LayerVisits:
        """Return how many layers a micro-batch visits, forward and backward.

        Args:
            backward_steps: Number of last steps that the backward pass reaches, or its mean; 0
                for a frozen model, None or more than R for all.
        """
        reached = min(recurrent_steps, math.inf if backward_steps is None else backward_steps)
        # A coda reads every state that has an exit logit.
        coda = self.coda_layers * (recurrent_steps if self.exit_gate is not None else 1)
        to_start = self.reaches_start(recurrent_steps, reached)
        return LayerVisits(
            self.prelude_layers + recurrent_steps * len(self.looped) + coda,
            self.prelude_layers * to_start + reached * len(self.looped) + coda * (reached > 0),
        )

    def reaches_start(self, recurrent_steps: float, reached: float) -> bool:
        """Return whether a backward pass through the last `reached` steps reaches the embedding."""
        return reached >= recurrent_steps or (reached > 0 and self.injection is not None)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return (parameters, training FLOPs per token at this config's R)."""
        return (
            sum(p.numel() for p in model.parameters()),
            int(self.training_flops(seq_len, self.recurrent_steps).total),
        )

    def training_flops(
        self,
        seq_len: int,
        recurrent_steps: float,
        trainable: Trainable = "all",
        backward_steps: float | None = None,
    ) -> Flops:
        """Return model FLOPs per trained token; arguments as of `training_flops_per_token`."""
        return training_flops_per_token(
            visits=self.layer_visits(recurrent_steps, backward_steps if trainable == "all" else 0),
            layer_parameters=self.layers[0].matrix_elements,
            query_width=self.layers[0].attention.widths[0],
            dim=self.dim,
            vocab_size=self.vocab_size,
            seq_len=seq_len,
            recurrent_steps=recurrent_steps,
            gate=self.exit_gate is not None,
            trainable=trainable,
            backward_steps=backward_steps,
        )
