"""Ouro: the looped decoder in its plainest form, with an exit gate.

`1.4b` and `2.6b` are the released models (1,434,652,673 and 2,667,974,657 parameters). The shapes
of the scaling study's other sizes are not published; they are inferred here: with a vocabulary of
32,000, an untied head and a feed-forward width of 8/3·D rounded up to a multiple of 256, whole
layer counts give exactly the printed 53M, 134M, 374M and 778M (and 1.364B for the shape of `1.4b`).

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 2, Appendix D; released checkpoints.
"""

from dataclasses import dataclass, field
from functools import partial

from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import Family, FamilyName, ModelSize
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
    """Which Ouro model to train; every field can be set on the command line."""

    family: FamilyName = field(default="ouro", init=False)


OURO = Family(
    name="ouro",
    options=OuroOptions,
    sizes=SIZES,
    decoder_config=partial(loop_config, LoopDecoder.Config),
)
