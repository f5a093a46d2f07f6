"""A decoder whose steps also read their own predictions: the head inside the recurrence.

Between two steps `decode` maps the state to Φ, the mean embedding of the tokens it decodes to.
`model.py` adds Φ to the state, `ponder.py` to a sum of embeddings. Head and embedding are one unit,
which `decode` visits R − 1 more times. Φ recomputes its logits in its own backward pass, so it need
not be part of a recomputed step.
"""

from dataclasses import dataclass, field

import spmd_types as spmd
from torch import Tensor
from torchtitan.models.common.decoder_sharding import dense_activation_placement
from torchtitan.models.common.nn_modules import Identity
from torchtitan.protocols.sharding import ShardingConfig

from titan_loop.families.discoloop.soft_decode import Decoding, soft_decode, soft_encode
from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.decoder_costs import Flops
from titan_loop.models.sharding import state_placement
from titan_loop.models.units import TABLES, Unit


class DecodingDecoder(LoopDecoder):
    """A looped decoder that can decode a state and embed the decoded tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """The looped decoder's config, and the settings of Φ."""

        decoding: Decoding
        decoded_state: Identity.Config = field(default_factory=Identity.Config)

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Declare placements; Φ is a partial sum by rank until it is placed like a state."""
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.decoded_state.sharding_config = ShardingConfig(
                in_src_shardings={"input": dense_activation_placement(tp=spmd.P)},
                in_dst_shardings={"input": state_placement(enable_sp)},
            )

        def own_flops(self, flops: Flops, recurrent_steps: float, reached: float) -> Flops:
            """As in the base class, with Φ between every two steps."""
            forward, backward = self.decoding.training_flops(self.dim, self.vocab_size)
            between = recurrent_steps - 1
            return flops._replace(decoding=between * forward + min(between, reached) * backward)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.decoded_state = config.decoded_state.build()

    def decode(self, hidden_BLD: Tensor, context: LoopContext) -> Tensor:
        """Return Φ of the state after a step, (B, L, D)."""
        if context.said_BLV is not None:
            decoded_BLD = soft_encode(
                context.said_BLV, self.tok_embeddings.weight, self.config.decoding
            )
            return decoded_BLD.to(hidden_BLD.dtype)
        read_BLD = self.state_gather(self.read(hidden_BLD, context))
        decoded_BLD = soft_decode(self.lm_head, read_BLD, self.tok_embeddings, self.config.decoding)
        return self.decoded_state(decoded_BLD).to(hidden_BLD.dtype)

    def units(self) -> list[Unit]:
        """List the units; head and embedding are one, tied or not, as `decode` needs both."""
        tables = (self.tok_embeddings, *self.positions.tables(), self.lm_head)
        return [
            Unit(TABLES, tables, place="after", between=True, kept=True),
            *(unit for unit in super().units() if unit.name != TABLES),
        ]
