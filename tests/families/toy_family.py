"""A family in the tests alone: its carry is cumulative, with a norm of its own, and it has an aux.

E_1 = e,   E_{r+1} = E_r + s · norm_u(h_r),   aux energy = mean of h_R² over the width
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torchtitan.models.common.decoder_sharding import norm_config

from titan_loop.models.context import LoopContext
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import Family, FamilyName, ModelSize
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.loop_config import NORM_EPS, loop_config
from titan_loop.models.loop_options import LoopOptions
from titan_loop.models.output import LoopOutput
from titan_loop.models.units import Unit
from titan_loop.plugins import Plugin, register


@dataclass(kw_only=True, slots=True)
class ToyOptions(LoopOptions):
    """Which toy model to train."""

    family: FamilyName = field(default="toy", init=False)

    update_scale: float = 0.5
    """s, the factor on what a step adds to the carry."""


class ToyDecoder(LoopDecoder):
    """A looped decoder whose steps start from the sum of all states so far."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopDecoder.Config):
        """Ouro's, the norm u and the factor s."""

        update_norm: FinalNorm.Config
        update_scale: float

        def set_sharding(self, *, enable_sp: bool) -> None:
            LoopDecoder.Config.set_sharding(self, enable_sp=enable_sp)
            self.update_norm.sharding_config = norm_config(enable_sp=enable_sp)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.update_norm = config.update_norm.build()
        self.update_scale = config.update_scale

    def advance(self, carry: Tensor, hidden_BLD: Tensor, step: int, context: LoopContext) -> Tensor:
        return carry + self.update_scale * self.update_norm(hidden_BLD)

    def forward(self, *args, **named) -> LoopOutput:
        output = super().forward(*args, **named)
        return output._replace(aux={"energy": output.hidden_RBLD[-1].square().mean(-1)})

    def units(self) -> list[Unit]:
        return [*super().units(), Unit("update norm", (self.update_norm,), fp32=True, kept=True)]


def decoder_config(options: ToyOptions, shape: ModelSize, max_seq_len: int) -> ToyDecoder.Config:
    norm = FinalNorm.Config(
        normalized_shape=shape.dim,
        eps=NORM_EPS,
        param_init={"weight": partial(nn.init.constant_, val=0.5)},
    )
    own = {"update_norm": norm, "update_scale": options.update_scale}
    return loop_config(ToyDecoder.Config, options, shape, max_seq_len, **own)


TOY = Family(
    name="toy",
    options=ToyOptions,
    sizes={"debugmodel": ModelSize(64, 2, 4, 192, vocab_size=128, recurrent_steps=3)},
    decoder_config=decoder_config,
    uses=frozenset({"generate", "held_out"}),
    exit_policies=frozenset({"static", "hidden"}),
)

register(Plugin(families={"toy": TOY}))
