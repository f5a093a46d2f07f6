"""A family that lives in the tests alone: its carry has two leaves and depends on the step.

    E_1 = e,  E_{r+1} = E_r + r · Σ_v softmax(W h_r)_v V_v,  input_r = E_r / (1 + (r − 1)/20)

as in PonderLM, but for the two factors, which make every mistake about a step visible.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.inference.reference import perturbed
from tests.models.reference import Weights
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import decoder_config


class Pondered(NamedTuple):
    """The sum of embeddings, and the number of steps that were done."""

    sum_BLD: Tensor
    steps_BL: Tensor


class PonderDecoder(LoopDecoder):
    """A looped decoder whose steps start from a growing sum of decoded embeddings."""

    def start(self, tokens: Tensor, context: LoopContext) -> Pondered:
        return Pondered(self.tok_embeddings(tokens), torch.zeros_like(tokens))

    def input(self, carry: Pondered, context: LoopContext) -> Tensor:
        return carry.sum_BLD / (1 + carry.steps_BL.unsqueeze(-1) / 20)

    def advance(self, carry, hidden_BLD, step, context) -> Pondered:
        factor = step.view(-1, 1, 1) if isinstance(step, Tensor) else step
        decoded_BLD = self.readout(hidden_BLD).softmax(-1) @ self.tok_embeddings.weight
        return Pondered(carry.sum_BLD + factor * decoded_BLD, carry.steps_BL + 1)


def ponder_model(*, max_seq_len: int, **options) -> PonderDecoder:
    """Return a debug model in float64, away from its symmetric start."""
    torch.manual_seed(0)
    options = OuroOptions(size="debugmodel", **options)
    model = PonderDecoder(decoder_config(options, max_seq_len=max_seq_len))
    with torch.no_grad():
        model.init_states()
    return perturbed(model).double()


def ponder_input(weights: Weights, embedding: Tensor, states: list[Tensor]) -> Tensor:
    """Return what follows `states`, from the equations above."""
    total = embedding
    for r, state in enumerate(states, start=1):
        scores = (state @ weights["lm_head.weight"].T).exp()
        mixture = scores / scores.sum(-1, keepdim=True)
        total = total + r * mixture @ weights["tok_embeddings.weight"]
    return total / (1 + len(states) / 20)
