"""Looped Llama blocks (Nanbeige) for transformers 4.57 and 5.x; written by titan_loop.

    h_r = n(layer_N(... layer_1(h_{r-1}) ...)),   r = 1 ... R = `config.num_loops`
    n = final norm, or the identity where `skip_loop_final_norm` is set and r < R

Feed-forward parts, norms and rotations are transformers' own. Every visit of a layer has a module
without parameters, whose `layer_idx` addresses the cache: any registered attention function, or one
that an engine puts in its place, sees R·N layers that share N layers' weights.
"""

import copy
import inspect

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_nanbeige import NanbeigeConfig

_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
# Transformers 5.24 renamed the cache, in arguments and in outputs.
_CACHE = "cache" if "cache" in _MASK_ARGUMENTS else "past_key_values"


class NanbeigeVisit(nn.Module):
    """Attention of one visit: a slot in the cache and a call of the attention function."""

    own_attention = None  # a function in place of the configured one

    def __init__(self, config: NanbeigeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = 0.0
        self.is_causal = True

    def forward(
        self, queries, keys, values, attention_mask, cache, cache_position, **kwargs
    ) -> Tensor:
        """Return (B, L, N, H) of (B, N, L, H) queries and (B, N_kv, L, H) keys and values."""
        if cache is not None:
            # Static caches before version 5 read the place, caches of continuous batching the rest.
            place = {"cache_position": cache_position}
            more = {"kwargs": kwargs} if _CACHE == "cache" else {"cache_kwargs": place}
            keys, values = cache.update(keys, values, self.layer_idx, **more)
        # In this form, since vLLM looks for the assignment in the source.
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attend = self.own_attention or attend
        out, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return out


class NanbeigeAttention(nn.Module):
    """The projections, which all visits of a layer share."""

    def __init__(self, config: NanbeigeConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, visit: NanbeigeVisit, rotations, **kwargs) -> Tensor:
        """Attend in `visit`; (B, L, D) in and out."""
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        queries, keys, values = (
            project(hidden).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotations)
        out = visit(queries, keys, values, **kwargs)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1))


class NanbeigeDecoderLayer(GradientCheckpointingLayer):
    """x + attention(n1(x)), then x + mlp(n2(x))."""

    def __init__(self, config: NanbeigeConfig):
        super().__init__()
        self.self_attn = NanbeigeAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, visit: NanbeigeVisit, **kwargs) -> Tensor:
        """Apply the layer in `visit`; (B, L, D) in and out."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), visit, **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class NanbeigePreTrainedModel(PreTrainedModel):
    """Class attributes that transformers reads from both classes."""

    config_class = NanbeigeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NanbeigeDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [_CACHE]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class NanbeigeModel(NanbeigePreTrainedModel):
    """Embedding, the stack applied `config.num_loops` times, and the final norm."""

    layer_class: type[nn.Module] = NanbeigeDecoderLayer
    visit_class: type[nn.Module] = NanbeigeVisit

    def __init__(self, config: NanbeigeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = range(config.num_unique_layers)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in layers)
        self.visits = nn.ModuleList()
        self._add_visits()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        cache_position=None,
        cache=None,
        **kwargs,
    ):
        """Return the normed state after the last loop; arguments as in `LlamaModel.forward`.

        With `output_hidden_states` also the state before every visit, and the normed one.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        visits = self._add_visits()
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # A visit that is computed again would add its keys twice.
            if cache is not None and cache.get_seq_length():
                raise ValueError("gradient checkpointing cannot go on from a cache; leave it out")
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache()
        seen = 0
        if isinstance(cache, Cache):  # one of continuous batching is not
            self._grow(cache, visits)
            seen = cache.get_seq_length()
        if cache_position is None:
            cache_position = torch.arange(seen, seen + hidden.shape[1], device=hidden.device)
        asked = {
            "config": self.config,
            "input_embeds": hidden,
            "inputs_embeds": hidden,
            "attention_mask": attention_mask,
            "cache_position": cache_position,
            _CACHE: cache,
            "position_ids": position_ids,
        }
        mask = self.make_mask(
            {name: value for name, value in asked.items() if name in _MASK_ARGUMENTS},
            cache_position,
        )
        # Not before the mask, which would look for several documents in given positions.
        position_ids = cache_position.unsqueeze(0) if position_ids is None else position_ids
        rotations = self.rotary_emb(hidden, position_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = []

        def visit(hidden: Tensor, layer: int, index: int) -> Tensor:
            if output_hidden_states:
                states.append(hidden)
            return self.layers[layer](
                hidden,
                self.visits[index],
                **self.inputs_of(layer, mask, rotations),
                cache=cache,
                cache_position=cache_position,
                **kwargs,
            )

        hidden = self.norm(self.apply_layers(hidden, visit))
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            **{_CACHE: cache},
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    def make_mask(self, asked: dict, places: Tensor):
        """Return the mask of one pass.

        Args:
            asked: Arguments of transformers' function.
            places: (L,) places of the queries among the keys.
        """
        return create_causal_mask(**asked)

    def inputs_of(self, layer: int, mask, rotations) -> dict:
        """Return the mask and rotations of one layer."""
        return {"attention_mask": mask, "rotations": rotations}

    def apply_layers(self, hidden: Tensor, visit) -> Tensor:
        """Return the state after all visits; `visit(hidden, layer, index)` makes the next one."""
        for index in range(self.config.num_hidden_layers):
            layer = index % len(self.layers)
            if index and layer == 0 and not self.config.skip_loop_final_norm:
                hidden = self.norm(hidden)
            hidden = visit(hidden, layer, index)
        return hidden

    def _add_visits(self) -> int:
        """Add modules until every visit has one; return the number of visits, which R changes."""
        visits = self.config.count_visits(len(self.layers))
        missing = range(len(self.visits), visits)
        self.visits.extend(self.visit_class(self.config, index) for index in missing)
        return visits

    def _grow(self, cache, visits: int) -> None:
        """Extend a cache with one slot per layer to one slot per visit."""
        layers = cache.layers
        if getattr(cache, "layer_class_to_replicate", None) is None and layers:
            layers.extend(copy.deepcopy(layers[0]) for _ in range(len(layers), visits))


class NanbeigeForCausalLM(NanbeigePreTrainedModel, GenerationMixin):
    """`NanbeigeModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_rep"}  # noqa: RUF012
    body_class = NanbeigeModel

    def __init__(self, config: NanbeigeConfig):
        super().__init__(config)
        self.model = self.body_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Return logits and, with labels, the mean next-token loss; as `LlamaForCausalLM`.

        `generate` and `Trainer` look for the names of these arguments and leave out any other.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.read(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            # A trainer that accumulates gradients names the number of targets in the arguments.
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{_CACHE: getattr(output, _CACHE)},
            hidden_states=output.hidden_states,
        )
        return result.to_tuple() if return_dict is False else result

    def read(self, hidden: Tensor) -> Tensor:
        """Return the logits of normed states."""
        return self.lm_head(hidden)


__all__ = ["NanbeigeForCausalLM", "NanbeigeModel", "NanbeigePreTrainedModel"]
