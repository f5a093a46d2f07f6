"""xLLM-Loop's mixtures of experts: prelude, core and coda of `xllm`, every layer with experts.

    h_r = core(inject(h_{r−1}, e)),   block:  x ← x + attention(n1(x)),   x ← x + experts(n2(x))

The loop's equations are in `titan_loop/families/xllm/decoder.py`, the experts' in
`feed_forward.py`. Models without an injection are of family `moe`.

Source: Huang et al. 2026 ("Towards Looped Models Done Right", Part I), arXiv 2610.06833, and their
code. Deviation: routers start with standard deviation 0.02, like all matrices, and balance by a
loss, a bias or both, where theirs have the loss alone.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from titan_loop.families.moe.decoder import MoEDecoder, SparseConfig
from titan_loop.families.moe.model import (
    ExpertOptions,
    check_experts,
    mixture_config,
    sparse,
)
from titan_loop.families.xllm.decoder import XllmDecoder
from titan_loop.families.xllm.model import SIZES, XllmOptions, xllm_config
from titan_loop.models.family import RUNTIME_OPTIONS, Family, FamilyName, ModelSize
from titan_loop.models.loop_config import residual_gain, width_ratio


@dataclass(kw_only=True, slots=True)
class XllmMoEOptions(ExpertOptions, XllmOptions):
    """Options of a model with sparse prelude, core and coda; every field is a flag."""

    family: FamilyName = field(default="xllm_moe", init=False)

    def canonical(self) -> dict[str, Any]:
        """Return the rotary base and widths."""
        return {**XllmOptions.canonical(self), **self.experts_canonical(self.hidden_dim)}


class XllmMoEDecoder(MoEDecoder, XllmDecoder):
    """The loop of `XllmDecoder` over layers with experts, counted and balanced."""

    @dataclass(kw_only=True, slots=True)
    class Config(SparseConfig, XllmDecoder.Config):
        """Start, states, norms and injection of the loop, and the experts."""

        dense_hidden_dim: int
        bias_rate: float
        expert_parallel: bool = False

    config: Config


def decoder_config(
    options: XllmMoEOptions, shape: ModelSize, max_seq_len: int
) -> XllmMoEDecoder.Config:
    """Return the architecture; arguments as in `Family.decoder_config`."""
    check_experts(options, shape)
    own: dict[str, Any] = {"dense_hidden_dim": shape.hidden_dim, "bias_rate": options.bias_rate}
    config = xllm_config(XllmMoEDecoder.Config, options, shape, max_seq_len, **own)
    gain = residual_gain(options, shape)
    std = options.initializer_range / math.sqrt(width_ratio(options, shape))
    for index, layer in enumerate(config.layers):
        mixture = mixture_config(options, shape, std=std, gain=gain)
        config.layers[index] = sparse(layer, mixture)
    return config


XLLM_MOE = Family(
    name="xllm_moe",
    options=XllmMoEOptions,
    sizes={name: SIZES[name] for name in ("debugmodel", "small", "730m")},
    decoder_config=decoder_config,
    runtime_options=RUNTIME_OPTIONS | {"injection_step", "bias_rate"},
    uses=frozenset({"export", "generate", "held_out"}),
)
