"""PonderLM: every step starts from the word embeddings and all decoded ones so far.

    E_1 = s · V[x]      h_r = f(E_r)      E_{r+1} = E_r + s · Σ_v p_v V[v],   p = softmax(W h_r / τ)

R steps are the paper's R − 1 ponder steps and a final pass. W is the head and V the embedding; they
may be one matrix. Sum and embeddings may be scaled by s = √D.

Source: Zeng et al. 2025 (PonderLM), arXiv 2505.20674, and their code: the sum is cumulative, and
where only the most likely tokens are kept, 100 of them, the softmax runs over these alone.
"""

from dataclasses import dataclass, field

from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.families.discoloop.decoding import DecodingDecoder
from titan_loop.families.discoloop.model import DecodingOptions
from titan_loop.families.ouro.model import SIZES
from titan_loop.models.context import LoopContext
from titan_loop.models.family import Family, FamilyName, ModelSize
from titan_loop.models.loop_config import loop_config
from titan_loop.models.recurrence import Carry


@dataclass(kw_only=True, slots=True)
class PonderOptions(DecodingOptions):
    """Which PonderLM to train."""

    family: FamilyName = field(default="ponder", init=False)


class PonderDecoder(DecodingDecoder):
    """A looped decoder whose steps start from a growing sum of embeddings."""

    @dataclass(kw_only=True, slots=True)
    class Config(DecodingDecoder.Config):
        """Architecture of a PonderLM."""

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        """Return the sum, with the decoded embedding of `step` added."""
        return carry + self.scaled(self.decode(hidden_BLD, context))


def decoder_config(
    options: PonderOptions, shape: ModelSize, max_seq_len: int
) -> PonderDecoder.Config:
    """Return the architecture; arguments as of `Family.decoder_config`."""
    if options.injection != "none":
        raise UserError(
            f"model.injection={options.injection}: every step of a PonderLM starts from the "
            "embeddings as it is; leave it at none"
        )
    decoding = options.decoding(shape.vocab_size)
    return loop_config(PonderDecoder.Config, options, shape, max_seq_len, decoding=decoding)


PONDER = Family(
    name="ponder",
    options=PonderOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"analyse", "generate", "held_out", "upcycle"}),
)
