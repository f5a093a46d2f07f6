"""The type of each matrix in a GGUF file.

A mixture of few bits gives some layers' values and down projections more of them: the first and
last eighth of the layers, and every third between. llama.cpp chooses them by their place among all
visits of a loop but numbers stored layers, so at R = 4 the last ones lose theirs; here the place
is among the stored layers. A type packs a row in blocks: where a row is no multiple of them, the
next coarser type takes its place, as in llama.cpp.

Source: `llama_model_quantize` of llama.cpp, whose choice and bytes these are at R = 1.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

Kind = GGMLQuantizationType


class _Mixture(NamedTuple):
    """Types of a file's matrices.

    Attributes:
        more: Type of values (also with queries and keys in one matrix) and `ffn_down` in some
            layers.
        head: Type of the head, also where it is the embedding.
    """

    file: LlamaFileType
    most: Kind
    more: Kind
    head: Kind


def _plain(name: str) -> _Mixture:
    file = LlamaFileType[f"ALL_{name}" if name == "F32" else f"MOSTLY_{name}"]
    return _Mixture(file, *[Kind[name]] * 3)


MIXTURES: Mapping[str, _Mixture] = {
    "float32": _plain("F32"),
    "float16": _plain("F16"),
    "bfloat16": _plain("BF16"),
    "q8_0": _plain("Q8_0"),
    "q6_k": _plain("Q6_K"),
    "q5_k_m": _Mixture(LlamaFileType.MOSTLY_Q5_K_M, Kind.Q5_K, Kind.Q6_K, Kind.Q6_K),
    "q4_k_m": _Mixture(LlamaFileType.MOSTLY_Q4_K_M, Kind.Q4_K, Kind.Q6_K, Kind.Q6_K),
    "q4_0": _plain("Q4_0")._replace(head=Kind.Q6_K),
}
"""By `--dtype`."""

WITHOUT_WHEEL = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0)
"""Types that the `gguf` package writes itself; llama.cpp's library quantises the others."""

_COARSER = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}


def kind_of(dtype: str, tensor: str, columns: int, *, layers: int, tied: bool) -> Kind:
    """Return the type of a matrix.

    Args:
        tensor: GGUF's name of it.
        columns: Length of its rows.
    """
    wanted = wanted_kind(dtype, tensor, layers=layers, tied=tied)
    while columns % GGML_QUANT_SIZES[wanted][0]:
        wanted = _COARSER.get(wanted, Kind.F16)
    return wanted


def wanted_kind(dtype: str, tensor: str, *, layers: int, tied: bool) -> Kind:
    """Return the type of a matrix whose rows are a multiple of any block; see `kind_of`."""
    mixture = MIXTURES[dtype]
    if tensor == ("token_embd.weight" if tied else "output.weight"):
        return mixture.head
    found = re.match(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down)\.", tensor)
    return mixture.more if found and _gets_more(int(found[1]), layers) else mixture.most


def _gets_more(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
