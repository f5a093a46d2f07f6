"""Inkling's mixture of experts, and the balance of their loads.

    y(x) = c Σ_{e in K} s_e / Σ_K s · E_e(x),   s = σ(W x),   K = the k largest of s + b
    E(x) = W_2 (cap_a(W_g x) ⊙ σ(W_g x) ⊙ cap_u(W_u x)),   cap_t(z) = t tanh(z / t)

b moves once an update, up for experts with less than the mean load and down for the others, and
only moves the choice. Dispatch has no capacity: every token reaches its k experts.

Sources: `inkling2_loop` in transformers 5.24; b by Wang et al. 2024, arXiv 2408.15664, Algorithm 1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.protocols.module import Module

from titan_loop.families.inkling.parts import wide
from titan_loop.models.initialisation import local_part


class Mixture(Module):
    """Experts in place of a feed-forward; (B, L, D) in and out.

    Attributes:
        bias_E: b.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        width: int
        experts: int
        top_k: int
        score_scale: float
        gate_softcap: float
        up_softcap: float

        @property
        def active_elements(self) -> int:
            """Number of weights that a token is multiplied by."""
            return self.dim * self.experts + 3 * self.dim * self.width * self.top_k

        @property
        def idle_elements(self) -> int:
            """Number of weights in the experts that a token does not visit."""
            return 3 * self.dim * self.width * (self.experts - self.top_k)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        experts, dim, width = config.experts, config.dim, config.width
        self.router = nn.Parameter(torch.empty(experts, dim))
        self.gate_up_EFD = nn.Parameter(torch.empty(experts, 2 * width, dim))
        self.down_EDF = nn.Parameter(torch.empty(experts, dim, width))
        self.register_buffer("bias_E", torch.zeros(experts), persistent=True)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y, and the number of tokens that chose each expert, (E,)."""
        config, x_TD = self.config, x_BLD.flatten(0, 1)
        scores_TE = (wide(x_TD) @ wide(self.router).T).sigmoid()
        expert_TK = (scores_TE + self.bias_E).topk(config.top_k, dim=-1, sorted=False).indices
        weight_TK = scores_TE.gather(1, expert_TK)
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20) * config.score_scale
        order_R = expert_TK.flatten().argsort(stable=True)
        load_E = torch.zeros(config.experts, dtype=torch.int64, device=x_BLD.device)
        load_E = load_E.scatter_add(0, expert_TK.flatten(), torch.ones_like(order_R))
        token_R = order_R // config.top_k
        out_RD = self._experts(x_TD[token_R], load_E)
        out_RD = wide(out_RD) * weight_TK.flatten()[order_R].unsqueeze(-1)
        out_TD = torch.zeros_like(x_TD, dtype=out_RD.dtype).index_add(0, token_R, out_RD)
        return out_TD.to(x_BLD.dtype).view_as(x_BLD), load_E

    def _experts(self, x_RD: Tensor, load_E: Tensor) -> Tensor:
        """Return E_e(x) for tokens sorted by expert."""
        ends_E = load_E.cumsum(0, dtype=torch.int32)

        def product(input_R: Tensor, weight: Tensor) -> Tensor:
            if input_R.dtype == torch.float64:  # which the grouped product has no kernel for
                parts = input_R.split(load_E.tolist())
                return torch.cat([x @ w.T for x, w in zip(parts, weight, strict=True)])
            return F.grouped_mm(input_R, weight.transpose(-2, -1), offs=ends_E)

        gate_RF, up_RF = wide(product(x_RD, self.gate_up_EFD)).chunk(2, dim=-1)
        gate_cap, up_cap = self.config.gate_softcap, self.config.up_softcap
        hidden_RF = gate_cap * torch.tanh(gate_RF / gate_cap) * gate_RF.sigmoid()
        hidden_RF = hidden_RF * (up_cap * torch.tanh(up_RF / up_cap))
        return product(hidden_RF.to(x_RD.dtype), self.down_EDF)

    @torch.no_grad()
    def balance(self, load_E: Tensor, rate: Tensor | float) -> None:
        """Move b by `rate`, from the loads of a whole training step."""
        direction_E = (load_E.float().mean() - load_E).sign()
        local_part(self.bias_E).add_(rate * (direction_E - direction_E.mean()))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.bias_E = torch.zeros(self.config.experts, device=buffer_device or self.bias_E.device)
