"""Inkling's mixture of experts, and the balance of their loads.

    y(x) = c Σ_{e in K} s_e / Σ_K s · E_e(x),   s = σ(W x),   K = the k largest of s + b
    E(x) = W_2 (cap_a(W_g x) ⊙ σ(W_g x) ⊙ cap_u(W_u x)),   cap_t(z) = t tanh(z / t)

b moves once an update, up for experts with less than the mean load and down for the others, and
only moves the choice. Router, dispatch and all-to-all are torchtitan's; there is no capacity: every
token reaches its k experts.

Sources: `inkling2_loop` in transformers 5.24; b by Wang et al. 2024, arXiv 2408.15664, Algorithm 1.
"""

from dataclasses import dataclass

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.module import Module

from titan_loop.families.inkling.parts import wide
from titan_loop.models.initialisation import local_part


class RouterGate(Linear):
    """W in at least fp32; torchtitan's router asks autocast for that, which a CPU does not have."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Width D and E outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, (B, L, E)."""
        return F.linear(wide(input), wide(self.weight))


class SoftcappedExperts(Module):
    """E_e(x) of tokens that are sorted by expert; under expert parallelism, of this rank's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int
        gate_softcap: float
        up_softcap: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts  # read by torchtitan's mixture
        self.gate_cap, self.up_cap = config.gate_softcap, config.up_softcap
        dim, width = config.dim, config.hidden_dim
        self.gate_up_EFD = nn.Parameter(torch.empty(self.num_experts, 2 * width, dim))
        self.down_EDF = nn.Parameter(torch.empty(self.num_experts, dim, width))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return E_e(x), (R, D)."""
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def product(input_R: Tensor, weight: Tensor) -> Tensor:
            if input_R.dtype == torch.float64:  # which the grouped product has no kernel for
                parts = input_R.split(num_tokens_per_expert_E.tolist())
                return torch.cat([x @ w.T for x, w in zip(parts, weight, strict=True)])
            return F.grouped_mm(input_R, weight.transpose(-2, -1), offs=ends_E)

        gate_up_EFD, down_EDF = map(local_part, (self.gate_up_EFD, self.down_EDF))
        gate_RF, up_RF = wide(product(x_RD, gate_up_EFD)).chunk(2, dim=-1)
        hidden_RF = self.gate_cap * torch.tanh(gate_RF / self.gate_cap) * gate_RF.sigmoid()
        hidden_RF = hidden_RF * (self.up_cap * torch.tanh(up_RF / self.up_cap))
        return product(hidden_RF.to(x_RD.dtype), down_EDF)


class Mixture(MoE):
    """Experts in place of a feed-forward; (B, L, D) in and out.

    Attributes:
        expert_bias_E: b.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """Experts and their router."""

        @property
        def active_elements(self) -> int:
            """Number of weights that a token is multiplied by."""
            experts = self.routed_experts.inner_experts
            used = 3 * experts.dim * experts.hidden_dim * self.router.top_k
            return used + experts.dim * self.num_experts

        @property
        def idle_elements(self) -> int:
            """Number of weights in the experts that a token does not visit."""
            experts = self.routed_experts.inner_experts
            return 3 * experts.dim * experts.hidden_dim * (self.num_experts - self.router.top_k)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return y, and the number of tokens that chose each expert, (E,)."""
        weight_BLK, expert_BLK, scores_BLE = self.router(x_BLD, self.expert_bias_E)
        load_E = torch.zeros(scores_BLE.shape[-1], dtype=torch.int64, device=x_BLD.device)
        chosen = expert_BLK.flatten()
        load_E = load_E.scatter_add(0, chosen, torch.ones_like(chosen))
        return self.routed_experts(x_BLD, weight_BLK, expert_BLK, load_E), load_E

    @torch.no_grad()
    def balance(self, load_E: Tensor, rate: Tensor | float) -> None:
        """Move b by `rate`, from the loads of a whole training step."""
        assert self.expert_bias_E is not None
        if not self.router.gate.weight.requires_grad:
            return  # a frozen model keeps its choices
        direction_E = (load_E.float().mean() - load_E).sign()
        local_part(self.expert_bias_E).add_(rate * (direction_E - direction_E.mean()))
