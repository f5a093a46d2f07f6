"""PonderLM: every step starts from the word embeddings and all decoded ones so far.

    E_1 = k s · V[x]    h_r = f(E_r)      E_{r+1} = E_r + s · Σ_v p_v V[v],   p = softmax(W h_r / τ)

R steps are the paper's R − 1 ponder steps and a final pass. W is the head and V the embedding; they
may be one matrix.

| symbol | code | the authors' scripts for 410M to 1.4B |
|---|---|---|
| k | `model.start_factor` | R − 1 = 3 |
| s | √D with `model.scale_embeddings`, else 1 | √D |
| p | `model.top_k`, `model.temperature` | all tokens, τ = 1 |

Source: Zeng et al. 2025 (PonderLM), arXiv 2505.20674, and their code. There the sum is cumulative,
and with their option top_k = 100, which no script uses, the softmax runs over these 100 tokens
alone. Deviation: k is a fixed option of the model, since R may change at evaluation and differ
between tokens; theirs follows the number of ponder steps.
"""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from titan_loop.bounds import FINITE
from titan_loop.families.discoloop.decoding import DecodingDecoder
from titan_loop.families.discoloop.model import DecodingOptions
from titan_loop.families.ouro.model import SIZES
from titan_loop.models.context import LoopContext
from titan_loop.models.family import Family, FamilyName, ModelSize, require_usual
from titan_loop.models.loop_config import loop_config
from titan_loop.models.recurrence import Carry


@dataclass(kw_only=True, slots=True)
class PonderOptions(DecodingOptions):
    """Options of PonderLM."""

    family: FamilyName = field(default="ponder", init=False)

    start_factor: Annotated[float, Gt(0), FINITE] = 1.0
    """k, the factor on the first step's input; above 1 it gives words more weight in the sum."""


class PonderDecoder(DecodingDecoder):
    """A looped decoder whose steps start from a growing sum of embeddings."""

    @dataclass(kw_only=True, slots=True)
    class Config(DecodingDecoder.Config):
        """Architecture of a PonderLM."""

        start_factor: float = 1.0

    config: Config

    def start(self, tokens: Tensor, context: LoopContext) -> Carry:
        """Return E_1: k times everything before the loop, so positions are scaled like words."""
        carry = super().start(tokens, context)
        factor = self.config.start_factor
        return carry if factor == 1.0 else factor * carry

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        """Return the sum, with the decoded embedding of `step` added."""
        return carry + self.scaled(self.decode(hidden_BLD, context))


def decoder_config(
    options: PonderOptions, shape: ModelSize, max_seq_len: int
) -> PonderDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    problem = "does not fit: every step of a PonderLM starts from the embeddings anyway"
    require_usual(options, ("injection",), problem)
    problem = "has no effect: a step hands on the decoded embedding, which is read through the norm"
    require_usual(options, ("norm_placement",), problem)
    return loop_config(
        PonderDecoder.Config,
        options,
        shape,
        max_seq_len,
        decoding=options.decoding(shape.vocab_size),
        start_factor=options.start_factor,
    )


PONDER = Family(
    name="ponder",
    options=PonderOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"analyse", "generate", "held_out", "upcycle"}),
)
