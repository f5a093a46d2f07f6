"""Ouro: the looped decoder in its plainest form, with an exit gate.

`1.4b` and `2.6b` are the released models (1,434,652,673 and 2,667,974,657 parameters). The shapes
of the scaling study's other sizes are not published; they are inferred here: with a vocabulary of
32,000, an untied head and a feed-forward width of 8/3·D rounded up to a multiple of 256, whole
layer counts give exactly the printed 53M, 134M, 374M and 778M (and 1.364B for the shape of `1.4b`).

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 2, Appendix D; released checkpoints.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from annotated_types import Ge
from torch import nn

from titan_loop.errors import UserError
from titan_loop.families.ouro.step_readout import OuroDecoder, StepReadout
from titan_loop.models.family import Family, FamilyName, ModelSize
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.loop_config import loop_config
from titan_loop.models.loop_options import LoopOptions

SIZES = {
    "debugmodel": ModelSize(64, 2, 4, 192, vocab_size=128, recurrent_steps=3),
    "quickstart": ModelSize(128, 4, 4, 384, vocab_size=1024),
    "53m": ModelSize(512, 6, 8, 1536, vocab_size=32_000),
    "134m": ModelSize(768, 12, 12, 2048, vocab_size=32_000),
    "374m": ModelSize(1024, 24, 16, 2816, vocab_size=32_000),
    "778m": ModelSize(1536, 24, 12, 4096, vocab_size=32_000),
    "1.4b": ModelSize(2048, 24, 16, 5632, vocab_size=49_152),
    "2.6b": ModelSize(2048, 48, 16, 5632, vocab_size=49_152),
}


@dataclass(kw_only=True, slots=True)
class OuroOptions(LoopOptions):
    """Options of Ouro models; every field is a flag."""

    family: FamilyName = field(default="ouro", init=False)

    readout_rank: Annotated[int | None, Ge(0)] = None
    """Rank of the map that each step has in front of head and gate; 0 for a scale per dimension
    only, None for no map. There are `recurrent_steps` maps; later steps share the last."""

    def reader_of_steps(self) -> str:
        """Return the readouts, else as in the base class."""
        if self.readout_rank is not None:
            return f"readout_rank={self.readout_rank}"
        return LoopOptions.reader_of_steps(self)


def decoder_config(options: OuroOptions, shape: ModelSize, max_seq_len: int) -> OuroDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    readout = None
    if options.readout_rank is not None:
        if options.readout_rank >= shape.dim:
            rank = f"model.readout_rank={options.readout_rank}"
            raise UserError(f"{rank} must be below model.dim={shape.dim}")
        readout = StepReadout.Config(
            dim=shape.dim,
            steps=shape.recurrent_steps,
            rank=options.readout_rank,
            param_init={
                "scale": nn.init.zeros_,
                "down": partial(normal_matrix, std=options.initializer_range),
                "up": nn.init.zeros_,
            },
        )
    return loop_config(
        OuroDecoder.Config,
        options,
        shape,
        max_seq_len,
        step_readout=readout,
    )


OURO = Family(
    name="ouro",
    options=OuroOptions,
    sizes=SIZES,
    decoder_config=decoder_config,
)
