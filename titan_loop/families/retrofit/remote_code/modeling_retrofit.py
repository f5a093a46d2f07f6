"""Retrofitted loops for transformers 4.57 and 5.x; written by titan_loop.

    e = prelude(embed(x)),   x_1 = e
    h_r = x_r + (g(x_r) - x_r) / K,   g = the looped layers,   r = 1 ... R = `config.num_loops`
    x_{r+1} = h_r, or with a bridge h_r + W n(e);   with a mixer x_r = A [h_{r-1}; e], h_0 = e or 0
    logits = head(norm(coda(h_R)))

`modeling_nanbeige.py` has layers, visits and caches.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .configuration_retrofit import RetrofitConfig
from .modeling_nanbeige import NanbeigeForCausalLM, NanbeigeModel


class RetrofitModel(NanbeigeModel):
    """Embedding, prelude, looped layers, coda and the final norm."""

    config_class = RetrofitConfig

    def __init__(self, config: RetrofitConfig):
        super().__init__(config)
        width = config.hidden_size
        if config.bridge:
            self.bridge = nn.Linear(width, width, bias=False)
            self.bridge_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        if config.mixer:
            self.mixer = nn.Linear(2 * width, width, bias=False)
        self.post_init()

    def apply_layers(self, hidden: Tensor, visit) -> Tensor:
        """As in the base class."""
        config = self.config
        core = range(config.prelude_layers, len(self.layers) - config.coda_layers)
        for layer in range(core.start):
            hidden = visit(hidden, layer, layer)
        prelude, index = hidden, core.start
        if config.start_at_zero:
            hidden = torch.zeros_like(prelude)
        for step in range(config.num_loops):
            if config.mixer:
                hidden = self.mixer(torch.cat((hidden, prelude), dim=-1))
            elif config.bridge and step:
                hidden = hidden + self.bridge(self.bridge_norm(prelude))
            before = hidden
            for layer in core:
                hidden = visit(hidden, layer, index)
                index += 1
            if config.damping > 1:
                hidden = torch.lerp(before, hidden, 1 / config.damping)
        for layer in range(core.stop, len(self.layers)):
            hidden = visit(hidden, layer, index)
            index += 1
        return hidden


class RetrofitForCausalLM(NanbeigeForCausalLM):
    """`RetrofitModel` with a language-model head."""

    config_class = RetrofitConfig
    body_class = RetrofitModel


__all__ = ["RetrofitForCausalLM", "RetrofitModel"]
