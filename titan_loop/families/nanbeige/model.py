"""Nanbeige: Llama's block, the whole stack applied R times, with or without a norm in between.

    h_r = n(block_N(… block_1(h_{r−1}) …)),   n = final norm, or the identity
    block:  x ← x + attention(n1(x)),   x ← x + SwiGLU(n2(x))

With P `prelude_layers` or K `coda_layers` only the C layers between them are looped. With the norm
at the readout alone, R steps equal a dense Llama of P + R·C + K layers; R = 1 is Llama.

Sources: Nanbeige4.2 (released config and code, keys `num_loops`, `skip_loop_final_norm`); Touvron
et al. 2023 (Llama), arXiv 2302.13971. Initial weights: `titan_loop/models/llama.py`.
"""

from dataclasses import dataclass, field

from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import Family, FamilyName, ModelSize
from titan_loop.models.llama import LLAMA_SIZES, LlamaOptions, llama_config


@dataclass(kw_only=True, slots=True)
class NanbeigeOptions(LlamaOptions):
    """Options of Nanbeige models."""

    family: FamilyName = field(default="nanbeige", init=False)


def decoder_config(
    options: NanbeigeOptions, shape: ModelSize, max_seq_len: int
) -> LoopDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    return llama_config(LoopDecoder.Config, options, shape, max_seq_len)


NANBEIGE = Family(
    name="nanbeige",
    options=NanbeigeOptions,
    sizes=LLAMA_SIZES,
    decoder_config=decoder_config,
)
