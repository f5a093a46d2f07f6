"""A looped language model (LoopLM, Ouro) for transformers 4.57 and 5.x; written by titan_loop.

    h_0 = embed(x)
    h_r = norm(layer_N(... layer_1(h_{r-1}) ...)),   r = 1 ... R = `config.total_ut_steps`
    exit logit_r = gate(h_r) in fp32,   logits_r = lm_head(h_r)

Every token is read out at one recurrent step: the last, `exit_at_step` (counted from 0), or the
first whose cumulative exit probability reaches `exit_threshold`. Once all tokens that are read out
have exited, the remaining steps are not computed. With a cache this is exact: the inputs of
skipped steps are kept, and the steps catch up if a later token goes deeper.

Attention functions, masks and caches come from transformers. Every visit of a layer has a module
without parameters, whose `layer_idx` addresses the cache: any registered attention function, or one
that an engine puts in its place, sees R·N layers that share N layers' weights. A cache of
transformers has no room for the inputs of skipped steps; with one, every step is computed.

Shapes: B batch, L current tokens, K all tokens so far, D width, V vocabulary, N heads, H head
width, R recurrent steps.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, sections 3.1 and 3.2; layout of the tensors as in
the released checkpoints.
"""

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_ouro import OuroConfig

_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
# Transformers 5.24 renamed the cache, in arguments and in outputs.
_CACHE = "cache" if "cache" in _MASK_ARGUMENTS else "past_key_values"


class OuroCache(DynamicCache):
    """Keys and values of every (recurrent step, layer), and the states of tokens that exited early.

    A token that exits after step r has no keys at step r + 1 yet. Its state is kept instead, and
    goes through step r + 1 together with the first later token that does.
    """

    def __init__(self):
        super().__init__()
        self._waiting: dict[int, Tensor] = {}  # step -> (B, tokens that did not run it, D)
        self.total_ut_steps: int | None = None
        self._position_BK: Tensor | None = None

    def positions(self, position_BL: Tensor) -> Tensor:
        """Return given positions behind those given before, for tokens that catch up."""
        earlier = self._position_BK
        if earlier is not None and earlier.shape[1] == self.get_seq_length():
            rows = max(len(earlier), len(position_BL))
            parts = [each.expand(rows, -1) for each in (earlier, position_BL)]
            position_BL = torch.cat(parts, dim=1)
        self._position_BK = position_BL
        return position_BL

    def start(self, total_ut_steps: int) -> None:
        """Refuse to go on with another number of steps than the first tokens had."""
        if self.total_ut_steps not in (None, total_ut_steps):
            raise ValueError(
                f"total_ut_steps={total_ut_steps}, but the cache was filled with "
                f"{self.total_ut_steps}; start with a new cache"
            )
        self.total_ut_steps = total_ut_steps

    def catch_up(self, step: int, hidden_BLD: Tensor) -> Tensor:
        """Return the input of `step`: states that wait for it, then `hidden_BLD`."""
        waiting = self._waiting.pop(step, None)
        return hidden_BLD if waiting is None else torch.cat([waiting, hidden_BLD], dim=1)

    def wait(self, step: int, hidden_BLD: Tensor) -> None:
        """Keep states that did not go through `step`, after those that wait for it already."""
        self._waiting[step] = self.catch_up(step, hidden_BLD)

    def is_waiting(self) -> bool:
        """Return whether tokens have exited early."""
        return bool(self._waiting)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch, for beam search."""
        super().reorder_cache(beam_idx)
        self._waiting = {step: states[beam_idx] for step, states in self._waiting.items()}
        if self._position_BK is not None and len(self._position_BK) > 1:
            self._position_BK = self._position_BK[beam_idx]


class Keys:
    """A cache as `create_causal_mask` reads it, for a step whose slots hold `seen` tokens."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, seen: int, total: int):
        self._seen, self._total = seen, total

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen before."""
        return self._seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the place of the first query."""
        return self._seen

    def get_mask_sizes(self, queries: Any, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, and the first one's place."""
        return self._total, 0


class OuroRMSNorm(nn.Module):
    """RMSNorm with statistics in fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        wide = hidden_BLD.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_BLD.dtype)


class OuroRotaryEmbedding(nn.Module):
    """(B, L) places -> cos and sin (B, L, H) in fp32, without a buffer that could be saved."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.config = config

    def forward(self, hidden_BLD: Tensor, position_BL: Tensor) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self.config.head_dim, 2, device=hidden_BLD.device).float()
        frequency = self.config.rope_theta ** (-exponent / self.config.head_dim)
        angle_BLH = position_BL[..., None].float() * frequency
        angle_BLH = torch.cat([angle_BLH, angle_BLH], dim=-1)
        return angle_BLH.cos(), angle_BLH.sin()


class OuroVisit(nn.Module):
    """Attention of one visit: a slot in the cache and a call of the attention function."""

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = 0.0
        self.is_causal = True

    def forward(
        self,
        q_BNLH: Tensor,
        k_BNLH: Tensor,
        v_BNLH: Tensor,
        attention_mask: Any,
        past_key_values: Cache | None,
        cache_position: Tensor,
        **settings,
    ):
        """Return (B, L, N, H), and the weights if the attention function has them."""
        if past_key_values is not None:
            # Static caches before version 5 read the place, caches of continuous batching the rest.
            place = {"cache_position": cache_position}
            more = {"kwargs": settings} if _CACHE == "cache" else {"cache_kwargs": place}
            k_BNLH, v_BNLH = past_key_values.update(k_BNLH, v_BNLH, self.layer_idx, **more)
        # In this form, since vLLM looks for the assignment in the source.
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(
            self,
            q_BNLH,
            k_BNLH,
            v_BNLH,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            **settings,
        )


class OuroAttention(nn.Module):
    """The projections, which all visits of a layer share.

    Arguments, attributes and the returned pair are named and ordered as in transformers' models:
    TransformerLens puts its own attention here, which uses slot `layer_idx + cycle_offset`.
    """

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads

    def forward(
        self,
        hidden_BLD: Tensor,
        visit: OuroVisit,
        position_embeddings: tuple[Tensor, Tensor],
        cycle_offset: int,
        **context,
    ):
        heads = (*hidden_BLD.shape[:2], -1, self.head_dim)
        q_BNLH = self.q_proj(hidden_BLD).view(heads).transpose(1, 2)
        k_BNLH = self.k_proj(hidden_BLD).view(heads).transpose(1, 2)
        v_BNLH = self.v_proj(hidden_BLD).view(heads).transpose(1, 2)
        q_BNLH = rotate(q_BNLH, *position_embeddings)
        k_BNLH = rotate(k_BNLH, *position_embeddings)
        out_BLNH, weights = visit(q_BNLH, k_BNLH, v_BNLH, **context)
        return self.o_proj(out_BLNH.reshape(*hidden_BLD.shape[:2], -1)), weights


class OuroMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_BLD)) * self.up_proj(hidden_BLD))


class OuroGate(nn.Module):
    """The exit gate; not an `nn.Linear`, which engines replace with their own."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dim))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return (B, L) exit logits in fp32: in bf16 the cumulative probability rounds to 1."""
        logit_BL1 = F.linear(hidden_BLD.float(), self.weight.float(), self.bias.float())
        return logit_BL1.squeeze(-1)


class OuroDecoderLayer(GradientCheckpointingLayer):
    """x + n2(attention(n1(x))), then x + n4(mlp(n3(x)))."""

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.self_attn = OuroAttention(config, layer_idx)
        self.mlp = OuroMLP(config)
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = OuroRMSNorm(dim, eps)
        self.input_layernorm_2 = OuroRMSNorm(dim, eps)
        self.post_attention_layernorm = OuroRMSNorm(dim, eps)
        self.post_attention_layernorm_2 = OuroRMSNorm(dim, eps)

    def forward(self, hidden_BLD: Tensor, visit: OuroVisit, **context) -> Tensor:
        attended_BLD, _ = self.self_attn(self.input_layernorm(hidden_BLD), visit, **context)
        hidden_BLD = hidden_BLD + self.input_layernorm_2(attended_BLD)
        fed_BLD = self.mlp(self.post_attention_layernorm(hidden_BLD))
        return hidden_BLD + self.post_attention_layernorm_2(fed_BLD)


@dataclass
class OuroModelOutput(BaseModelOutputWithPast):
    """Output of the stack: the state of each token at the step it is read out, and the exits.

    Attributes:
        hidden_states: On demand, (B, L, D) after each step that was run.
        exit_logits: (B, L, steps that were run), fp32.
        exit_steps: (B, L) step each token is read out at, counted from 0; -1 for padding and tokens
            outside `logits_to_keep` that had not exited when the others had.
    """

    exit_logits: Tensor | None = None
    exit_steps: Tensor | None = None


@dataclass
class OuroCausalLMOutput(CausalLMOutputWithPast):
    """As `OuroModelOutput`, with (B, kept tokens, V) logits of the step each token is read out at.

    Attributes:
        loss: Mean next-token cross entropy of these logits, with labels. Not the objective that
            looped models are trained with.
    """

    exit_logits: Tensor | None = None
    exit_steps: Tensor | None = None


class Readout:
    """Decides at which step each token is read out, and keeps its state.

        CDF(n) = 1 - prod_{j<=n} (1 - sigmoid(exit logit_j)),   read out at the first CDF(n) >= q

    In log space and fp32, as in the training code.

    Args:
        embedded_BLD: For shape and device.
        threshold: q; None reads the last step.
    """

    def __init__(self, embedded_BLD: Tensor, threshold: float | None):
        self.threshold = threshold
        self.hidden_states: list[Tensor] = []  # (B, L, D) per step
        self.exit_logits: list[Tensor] = []  # (B, L) per step
        self.state_BLD = torch.zeros_like(embedded_BLD)
        self.step_BL = embedded_BLD.new_full(embedded_BLD.shape[:2], -1, dtype=torch.long)
        self._log_survival_BL = self.step_BL.float() * 0

    def add(self, step: int, hidden_BLD: Tensor, logit_BL: Tensor, is_last: bool) -> None:
        """Take the next step's states and exit logits."""
        self.hidden_states.append(hidden_BLD)
        self.exit_logits.append(logit_BL)
        self._log_survival_BL = self._log_survival_BL + F.logsigmoid(-logit_BL)
        if is_last:
            here_BL = self.step_BL < 0
        elif self.threshold is not None:
            reached_BL = -torch.expm1(self._log_survival_BL) >= self.threshold
            here_BL = reached_BL & (self.step_BL < 0)
        else:
            return
        self.step_BL = torch.where(here_BL, step, self.step_BL)
        self.state_BLD = torch.where(here_BL.unsqueeze(-1), hidden_BLD, self.state_BLD)

    def is_complete(self, read_BL: Tensor) -> bool:
        """Return whether every token whose readout is needed has been read out."""
        return self.threshold is not None and bool((self.step_BL >= 0)[read_BL].all())


class OuroPreTrainedModel(PreTrainedModel):
    """Class attributes that transformers reads from both classes."""

    config_class = OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [_CACHE]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = True  # assisted decoding would have to shorten the cache: `generate` refuses it


class OuroModel(OuroPreTrainedModel):
    """Embedding, the stack applied up to `config.total_ut_steps` times, norm and exit gate."""

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = OuroRotaryEmbedding(config)
        layers = range(config.num_unique_layers)
        self.layers = nn.ModuleList(OuroDecoderLayer(config, index) for index in layers)
        self.visits = nn.ModuleList()
        self._add_visits()
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = OuroGate(config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        cache_position: Tensor | None = None,
        cache: Cache | None = None,
        **settings,
    ):
        """Run recurrent steps until every token that is read out has exited.

        Args:
            input_ids: (B, L) tokens the cache has not seen.
            attention_mask: (B, K) over all tokens so far, 0 at padding; positions do not count it.
                Or a mask of queries and keys, (B, 1, L, K), taken as it is.
            past_key_values: An `OuroCache`; with another cache every step is computed.
            inputs_embeds: (B, L, D) instead of `input_ids`.
            use_cache: Whether to start a cache; None takes the config's, and none in training.
            exit_at_step: Read every token out after this step, counted from 0.
            exit_threshold: In [0, 1]; None takes the config's. 1.0 reads the last step.
            logits_to_keep: Number of last tokens to read out, 0 for all; or their indices.
            output_hidden_states: Whether to return the state after each step.
            return_dict: False returns a tuple.
            position_ids: (B, L); None counts the tokens of the mask.
            cache_position: Not needed: the cache counts the tokens that it has seen.
            cache: `past_key_values` as transformers calls it from 5.24 on.
            **settings: For the attention function.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        self._add_visits()
        steps = self._steps(exit_at_step)
        threshold = self._threshold(exit_at_step, exit_threshold)
        hidden_BLD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_BLD.shape[1]
        cache = self._open_cache(past_key_values if cache is None else cache, use_cache)
        # A cache of continuous batching is no `Cache`; positions and masks come with it.
        total = length + (cache.get_seq_length() if isinstance(cache, Cache) else 0)
        keeps_waiting = cache is None or isinstance(cache, OuroCache)
        if isinstance(cache, OuroCache) and position_ids is not None:
            position_ids = cache.positions(position_ids)
        token_BK = self._tokens(attention_mask, total)
        read_BL = self._read_out(hidden_BLD, token_BK, logits_to_keep)

        readout = Readout(hidden_BLD, threshold)
        context, context_length, step = {}, None, 0
        for step in range(steps if keeps_waiting else self.config.total_ut_steps):
            if isinstance(cache, OuroCache):
                hidden_BLD = cache.catch_up(step, hidden_BLD)
            if context_length != hidden_BLD.shape[1]:
                context_length = hidden_BLD.shape[1]
                context = self._context(
                    hidden_BLD, token_BK, attention_mask, position_ids, total, cache, settings
                )
            hidden_BLD = self._step(hidden_BLD, context, step)
            new_BLD = hidden_BLD[:, -length:]
            if step < steps:
                readout.add(step, new_BLD, self.early_exit_gate(new_BLD), is_last=step + 1 == steps)
            if keeps_waiting and readout.is_complete(read_BL):
                break
        if isinstance(cache, OuroCache) and step + 1 < self.config.total_ut_steps:
            cache.wait(step + 1, hidden_BLD)

        wants_states = (
            self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states
        )
        output = OuroModelOutput(
            last_hidden_state=readout.state_BLD,
            **{_CACHE: cache},
            hidden_states=tuple(readout.hidden_states) if wants_states else None,
            exit_logits=torch.stack(readout.exit_logits, dim=-1),
            exit_steps=readout.step_BL,
        )
        return output.to_tuple() if return_dict is False else output

    def _add_visits(self) -> None:
        """Have one module per visit, even if `config.total_ut_steps` was raised after loading."""
        wanted = range(len(self.visits), self.config.total_ut_steps * len(self.layers))
        self.visits.extend(OuroVisit(self.config, index) for index in wanted)

    def _steps(self, exit_at_step: int | None) -> int:
        """Return the largest number of steps to run."""
        total = self.config.total_ut_steps
        if exit_at_step is None:
            return total
        if not 0 <= exit_at_step < total:
            raise ValueError(
                f"exit_at_step={exit_at_step} must be in 0 ... {total - 1}; for more, raise "
                "config.total_ut_steps"
            )
        return exit_at_step + 1

    def _threshold(self, exit_at_step: int | None, exit_threshold: float | None) -> float | None:
        """Return the threshold, None for reading the last step."""
        if exit_at_step is not None and exit_threshold is not None:
            raise ValueError("give either exit_at_step or exit_threshold")
        if exit_at_step is not None:
            return None
        threshold = self.config.early_exit_threshold if exit_threshold is None else exit_threshold
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"exit_threshold={threshold} must be in [0, 1]")
        # 1 means never early, also where the cumulative probability rounds to 1.
        return None if threshold == 1.0 else threshold

    def _open_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the cache to use, with one slot per visit."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # A visit that is computed again would add its keys twice.
            if cache is not None and cache.get_seq_length():
                raise ValueError("gradient checkpointing cannot go on from a cache; leave it out")
            return None
        if cache is None:
            wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
            cache = OuroCache() if wanted else None
        if isinstance(cache, OuroCache):
            cache.start(self.config.total_ut_steps)
        elif isinstance(cache, Cache) and cache.layers and cache.layer_class_to_replicate is None:
            # transformers made a slot per layer; every visit needs one.
            missing = self.config.total_ut_steps * len(self.layers) - len(cache.layers)
            cache.layers.extend(copy.deepcopy(cache.layers[0]) for _ in range(missing))
        return cache

    def _tokens(self, attention_mask: Tensor | None, total: int) -> Tensor | None:
        """Return (B, K) True at tokens, None if the mask does not tell."""
        if attention_mask is None or is_whole(attention_mask):
            return None
        if attention_mask.ndim != 2 or attention_mask.shape[1] != total:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must be "
                f"(batch, {total}): all tokens so far, those in the cache included"
            )
        return attention_mask != 0

    def _read_out(
        self, hidden_BLD: Tensor, token_BK: Tensor | None, logits_to_keep: int | Tensor
    ) -> Tensor:
        """Return (B, L) True at tokens whose readout is needed."""
        read_BL = torch.zeros_like(hidden_BLD[..., 0], dtype=torch.bool)
        read_BL[:, kept(logits_to_keep)] = True
        return read_BL if token_BK is None else read_BL & token_BK[:, -hidden_BLD.shape[1] :]

    def _context(
        self,
        hidden_BLD: Tensor,
        token_BK: Tensor | None,
        attention_mask: Tensor | None,
        position_BL: Tensor | None,
        total: int,
        cache: Cache | None,
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        """Build what layers need for the last `hidden_BLD.shape[1]` of all tokens."""
        length, device = hidden_BLD.shape[1], hidden_BLD.device
        if is_whole(attention_mask) and isinstance(cache, OuroCache) and cache.is_waiting():
            raise ValueError(
                "attention_mask has no rows for tokens that exited early; give (batch, tokens)"
            )
        place_L = torch.arange(total - length, total, device=device)
        is_given = position_BL is not None and position_BL.shape[1] >= length
        if is_given:
            position_BL = position_BL[:, -length:]
        elif token_BK is None:
            position_BL = place_L[None]
        else:
            position_BK = token_BK.long().cumsum(dim=1) - 1
            position_BL = position_BK.clamp(min=0)[:, total - length :]
        keys = Keys(total - length, total) if isinstance(cache, OuroCache) else cache
        asked = {
            "config": self.config,
            "input_embeds": hidden_BLD,
            "inputs_embeds": hidden_BLD,
            "attention_mask": attention_mask,
            "cache_position": place_L,
            _CACHE: keys,
            # Documents begin where given positions start again; the mask separates them.
            "position_ids": position_BL if is_given and keys is None else None,
        }
        mask = create_causal_mask(
            **{name: value for name, value in asked.items() if name in _MASK_ARGUMENTS}
        )
        return {
            **settings,
            "position_embeddings": self.rotary_emb(hidden_BLD, position_BL),
            "attention_mask": mask,
            "past_key_values": cache,
            "cache_position": place_L,
        }

    def _step(self, hidden_BLD: Tensor, context: dict[str, Any], step: int) -> Tensor:
        offset = step * len(self.layers)
        for index, layer in enumerate(self.layers):
            visit = self.visits[offset + index]
            hidden_BLD = layer(hidden_BLD, visit, cycle_offset=offset, **context)
        return self.norm(hidden_BLD)


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):
    """`OuroModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **settings,
    ):
        """Return the logits of the step each token is read out at.

        `labels` are (B, L) tokens like `input_ids`, -100 where there is no loss; they need all
        logits. See `OuroModel.forward` for the other arguments.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need all logits; leave logits_to_keep at 0")
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            exit_at_step=exit_at_step,
            exit_threshold=exit_threshold,
            logits_to_keep=logits_to_keep,
            output_hidden_states=output_hidden_states,
            **settings,
        )
        logits_BLV = self.lm_head(output.last_hidden_state[:, kept(logits_to_keep)])
        loss = None
        if labels is not None:
            # A trainer that accumulates gradients names the number of targets in the settings.
            loss = self.loss_function(logits_BLV, labels, self.vocab_size, **settings)
        result = OuroCausalLMOutput(
            loss=loss,
            logits=logits_BLV,
            **{_CACHE: getattr(output, _CACHE)},
            hidden_states=output.hidden_states,
            exit_logits=output.exit_logits,
            exit_steps=output.exit_steps,
        )
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *sizes):
        """Take an `OuroCache`, with which exits save work, unless `generate` names another kind."""
        names = (generation_config.cache_implementation, model_kwargs.get(_CACHE))
        if names == (None, None) and generation_config.use_cache is not False:
            model_kwargs[_CACHE] = OuroCache()
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *sizes)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        next_sequence_length: int | None = None,
        cache_position: Tensor | None = None,
        **kwargs,
    ) -> dict:
        """Pass the tokens that the cache does not hold; positions follow from the mask."""
        cache = past_key_values if cache is None else cache
        seen = 0 if cache is None else cache.get_seq_length()
        if inputs_embeds is not None and use_cache is False:
            raise ValueError("inputs_embeds are the prompt alone: generate with use_cache=True")
        # Embeddings are the prompt; the tokens after it are ids.
        has_ids = inputs_embeds is None or seen >= inputs_embeds.shape[1]
        given = input_ids if has_ids else inputs_embeds
        if next_sequence_length is None and cache_position is not None:  # before version 5
            next_sequence_length = cache_position.shape[0]
        if next_sequence_length is not None:
            given = given[:, -next_sequence_length:]
        if attention_mask is not None and attention_mask.shape[1] != seen + given.shape[1]:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} tokens, the cache {seen} and the "
                f"input {given.shape[1]} more; give all tokens, those in the cache included"
            )
        return {
            ("input_ids" if has_ids else "inputs_embeds"): given,
            _CACHE: cache,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "exit_at_step": exit_at_step,
            "exit_threshold": exit_threshold,
            "logits_to_keep": logits_to_keep,
            "output_hidden_states": kwargs.get("output_hidden_states"),
        }


def is_whole(mask: Any) -> bool:
    """Return whether a mask is one of queries and keys, which transformers takes as it is."""
    return mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)


def kept(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Return the index of the tokens to read out."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def rotate(x_BNLH: Tensor, cos_BLH: Tensor, sin_BLH: Tensor) -> Tensor:
    """Rotate halves of each head by its token's position, in fp32; the dtype is kept."""
    wide = x_BNLH.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos_BLH.unsqueeze(1) + turned * sin_BLH.unsqueeze(1)).to(x_BNLH.dtype)


__all__ = ["OuroForCausalLM", "OuroModel", "OuroPreTrainedModel"]
