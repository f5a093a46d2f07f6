"""Retrofitted loops for transformers 4.57 and 5.x; written by titan_loop.

    e = prelude(embed(x)),   x_1 = e
    h_r = x_r + (g(x_r) - x_r) / K,   g = the looped layers,   r = 1 ... R = `config.num_loops`
    x_{r+1} = h_r, or with a bridge h_r + W n(e);   with a mixer x_r = A [h_{r-1}; e], h_0 = e or 0
    logits = head(norm(coda(h_R)))

`modeling_nanbeige.py` has visits and caches, `modeling_dense.py` the layers.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .configuration_retrofit import RetrofitConfig
from .modeling_dense import (
    DenseDecoderLayer,
    DenseVisit,
    Rotations,
    ScaledEmbedding,
    capped,
    make_norm,
    option,
    sliding_mask,
)
from .modeling_nanbeige import NanbeigeForCausalLM, NanbeigeModel


class RetrofitModel(NanbeigeModel):
    """Embedding, prelude, looped layers, coda and the final norm."""

    config_class = RetrofitConfig
    layer_class = DenseDecoderLayer
    visit_class = DenseVisit

    def __init__(self, config: RetrofitConfig):
        super().__init__(config)
        width = config.hidden_size
        if option(config, "embedding_scale") != 1:
            self.embed_tokens = ScaledEmbedding(
                option(config, "embedding_scale"), config.vocab_size, width, config.pad_token_id
            )
        self.norm = make_norm(config, width)
        self.rotary_emb = Rotations(config)
        if config.bridge:
            self.bridge = nn.Linear(width, width, bias=False)
            self.bridge_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        if config.mixer:
            self.mixer = nn.Linear(2 * width, width, bias=False)
        self.post_init()

    def make_mask(self, asked: dict, places: Tensor):
        """As in the base class, with the mask of layers that see a window."""
        window, whole = option(self.config, "window"), super().make_mask(asked, places)
        return whole, None if window is None else sliding_mask(asked, places, window)

    def inputs_of(self, layer: int, mask, rotations) -> dict:
        """As in the base class."""
        windowed = layer in option(self.config, "windowed_layers")
        turned = None if layer in option(self.config, "unrotated_layers") else rotations[windowed]
        return {"attention_mask": mask[windowed], "rotations": turned, "windowed": windowed}

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

    def read(self, hidden: Tensor) -> Tensor:
        """As in the base class, scaled and capped."""
        logits = self.lm_head(hidden) * option(self.config, "logit_scale")
        return capped(logits, option(self.config, "logit_softcap"))


__all__ = ["RetrofitForCausalLM", "RetrofitModel"]
