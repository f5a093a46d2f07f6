"""DiscoLoop: between two steps the state is decoded, re-embedded and added to itself.

    h_{r+1} = f(h̃_r)      h̃_r = h_r + α_r ⊙ RMSNorm(Φ(h_r)),  r = 1 … R − 1      h̃_0 = W[x]
    Φ(h) = Σ_v p_v W[v]    p = softmax(W h / τ)
    α = α*, a constant, or σ(⟨w_α, Φ(h)⟩ + b_α) for each token, with weights that all steps share

| symbol | code |
|---|---|
| f | the looped layers, and their norm |
| Φ, τ | `DecodingDecoder.decode`, `model.temperature` |
| RMSNorm, α | `DecodedChannel` |
| α* | `model.channel_strength` |
| K, the tokens that Φ keeps | `model.top_k`; the paper keeps 128 in language models, else all |

The paper leaves open whether RMSNorm has a gain; here it has one, which starts at 1. The paper also
leaves open the gate and τ of its language models. The learned gate starts at α = 1/2. Without an
exit gate the loss is the last step's cross entropy.

Source: Fu et al. 2026 (DiscoLoop), arXiv 2607.00341, §4 Eq. 4–6, Appendix B.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.protocols.module import Module

from titan_loop.bounds import FINITE
from titan_loop.errors import UserError
from titan_loop.families.discoloop.decoding import DecodingDecoder
from titan_loop.families.discoloop.soft_decode import Decoding
from titan_loop.families.ouro.model import SIZES
from titan_loop.models.context import LoopContext
from titan_loop.models.family import Family, FamilyName, ModelSize, require_usual
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.loop_config import NORM_EPS, loop_config
from titan_loop.models.loop_options import LoopOptions
from titan_loop.models.recurrence import Carry
from titan_loop.models.sharding import mixed_states
from titan_loop.models.units import Unit

ChannelGate: TypeAlias = Literal["fixed", "learned"]
"""Strength with which Φ is added: a constant, or a gate that reads Φ."""


@dataclass(kw_only=True, slots=True)
class DecodingOptions(LoopOptions):
    """Options of every family with a decoded channel."""

    retired: ClassVar[Mapping[str, Any]] = {"normalised_over": "top_k"}

    exit_gate: bool = False
    """Whether there is an exit gate; without one the loss is the last step's."""

    tie_weights: bool = True
    """Whether embedding and head share one matrix."""

    temperature: Annotated[float, Gt(0), FINITE] = 1.0
    """τ, by which logits are divided before the softmax between two steps."""

    top_k: Annotated[int | None, Ge(1)] = None
    """Number of tokens whose embeddings are mixed between two steps; None for all of them."""

    def decoding(self, vocab_size: int) -> Decoding:
        """Return the decoding options of Φ; raises `UserError` for options that cannot work."""
        problem = "does not fit: a state is decoded between two steps without layers of its own"
        require_usual(self, ("coda_layers",), problem)
        if self.top_k is not None and self.top_k > vocab_size:
            problem = f"is more than the {vocab_size} tokens of the vocabulary"
            raise UserError(f"model.top_k={self.top_k} {problem}; leave it out to keep all of them")
        if self.top_k == 1:
            require_usual(self, ("temperature",), "has no effect with model.top_k=1")
        return Decoding(self.temperature, self.top_k)


@dataclass(kw_only=True, slots=True)
class DiscoLoopOptions(DecodingOptions):
    """Options of DiscoLoop models."""

    family: FamilyName = field(default="discoloop", init=False)

    channel_gate: ChannelGate = "fixed"
    """Strength of the decoded embedding: fixed; or learned, computed for each token."""

    channel_strength: Annotated[float, Gt(-math.inf), FINITE] = 1.0
    """α* of the fixed gate."""


class DecodedChannel(Module):
    """Adds the normed Φ to the state."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The norm of Φ, and α*; None for the learned gate."""

        norm: FinalNorm.Config
        strength: float | None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = config.norm.build()
        self.strength = config.strength
        if config.strength is None:
            self.weight = nn.Parameter(torch.empty(config.norm.normalized_shape))
            self.bias = nn.Parameter(torch.empty(1))

    def forward(self, hidden_BLD: Tensor, decoded_BLD: Tensor) -> Tensor:
        """Return h̃; the gate computes in the dtype of its weights, fp32 in training."""
        normed_BLD = self.norm(decoded_BLD)
        if self.strength is not None:
            return hidden_BLD + self.strength * normed_BLD
        logit_BL1 = (decoded_BLD * self.weight).sum(dim=-1, keepdim=True) + self.bias
        return hidden_BLD + logit_BL1.sigmoid().to(hidden_BLD.dtype) * normed_BLD


class DiscoLoopDecoder(DecodingDecoder):
    """A looped decoder with a discrete channel beside the continuous one."""

    @dataclass(kw_only=True, slots=True)
    class Config(DecodingDecoder.Config):
        """Architecture of a DiscoLoop model."""

        channel: DecodedChannel.Config

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Declare placements; the gate's weights are placed like a norm's gain."""
            DecodingDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.channel.norm.sharding_config = norm_config(enable_sp=enable_sp)
            self.channel.sharding_config = mixed_states(
                "hidden_BLD", "decoded_BLD", weights=("weight", "bias"), enable_sp=enable_sp
            )

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.channel = config.channel.build()

    def advance(
        self, carry: Carry, hidden_BLD: Tensor, step: int | Tensor, context: LoopContext
    ) -> Carry:
        """Return h̃; arguments as in the base class."""
        mixed_BLD = self.channel(hidden_BLD, self.decode(hidden_BLD, context))
        return super().advance(carry, mixed_BLD, step, context)

    def units(self) -> list[Unit]:
        """List the units, the channel's own among them."""
        channel = Unit("decoded channel", (self.channel,), place="between", fp32=True, kept=True)
        return [*super().units(), channel]


def decoder_config(
    options: DiscoLoopOptions, shape: ModelSize, max_seq_len: int
) -> DiscoLoopDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    learned = options.channel_gate == "learned"
    if learned:
        problem = "has no effect with model.channel_gate=learned"
        require_usual(options, ("channel_strength",), problem)
    problem = "does not fit: DiscoLoop decodes and encodes with one matrix"
    require_usual(options, ("tie_weights",), problem)
    norm = FinalNorm.Config(
        normalized_shape=shape.dim, eps=NORM_EPS, param_init={"weight": nn.init.ones_}
    )
    return loop_config(
        DiscoLoopDecoder.Config,
        options,
        shape,
        max_seq_len,
        decoding=options.decoding(shape.vocab_size),
        channel=DecodedChannel.Config(
            norm=norm,
            strength=None if learned else options.channel_strength,
            param_init={"weight": nn.init.zeros_, "bias": nn.init.zeros_},
        ),
    )


DISCOLOOP = Family(
    name="discoloop",
    options=DiscoLoopOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
    uses=frozenset({"analyse", "generate", "held_out", "upcycle"}),
)
