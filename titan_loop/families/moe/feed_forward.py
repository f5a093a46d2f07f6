"""A mixture of experts in place of a layer's feed-forward; the recurrent steps share the experts.

    s = sigmoid(W x) or softmax(W x)            scores (E,) of a token x; W of the layer, or of
                                                (layer, step)
    K = the k largest of s + b                  b balances the load, and only moves the choice
    y = Σ_{e in K} g_e E_e(x) + S(x)            g = c·s, or c·s / Σ_K s;  S the shared experts

Router, dispatch, all-to-all and grouped products are torchtitan's. Dispatch has no capacity: every
token reaches its k experts, however many others choose them.

Shape suffixes: B batch, L sequence, D width, E experts, K chosen experts, S routers, R rows of
tokens sorted by expert.

Sources: Shazeer et al. 2017, arXiv 1701.06538 (mixture, top k); Wang et al. 2024, arXiv 2408.15664
(b); DeepSeek-V3, arXiv 2412.19437, §2.1.2, Eq. 17-20 (balance of a window); Zoph et al. 2022,
arXiv 2202.08906, §3.2 (z).
"""

from dataclasses import dataclass
from typing import NamedTuple

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.protocols.module import ModuleList

from titan_loop.models.initialisation import local_part

ALIGNED = 8  # grouped products read 16 bytes at a time, 8 values in bf16


class Routing(NamedTuple):
    """A visit's routing, for losses and metrics.

    Attributes:
        load_E: Tokens of this micro-batch that chose each expert.
        balance_B: Balance of each window, 1 if all experts have equal loads and equal scores:

            balance = E / (k L²) Σ_e (tokens of e) (Σ_t s_te / Σ_e s_te)

        z_BL: Squared logarithm of Σ_e exp(logit_e).
    """

    load_E: Tensor
    balance_B: Tensor
    z_BL: Tensor


class Experts(GroupedExperts):
    """torchtitan's experts, computed in the dtype of their weights; upstream's are always bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Widths and number of experts."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return E_e(x) for tokens sorted by expert, (R, D)."""
        w1_EFD, w2_EDF, w3_EFD = map(local_part, (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def product(input_R: Tensor, weight: Tensor) -> Tensor:
            if input_R.dtype == torch.float64:  # which the grouped product has no kernel for
                parts = input_R.split(num_tokens_per_expert_E.tolist())
                return torch.cat([x @ w.T for x, w in zip(parts, weight, strict=True)])
            return self._grouped_mm(A=input_R, B_t=weight.transpose(-2, -1), offs=ends_E)

        input_RD = x_RD.to(w1_EFD.dtype)
        hidden_RF = F.silu(product(input_RD, w1_EFD)) * product(input_RD, w3_EFD)
        return product(hidden_RF, w2_EDF).type_as(x_RD)


class RouterGate(Linear):
    """The router's matrix; keeps its logits until they are taken, since routers return scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Width D and E outputs."""

    logits_BLE: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, (B, L, E), at least fp32: a CPU has no autocast to that."""
        wide = torch.promote_types(input.dtype, torch.float32)
        self.logits_BLE = F.linear(input.to(wide), self.weight.to(wide))
        return self.logits_BLE

    def take_logits(self) -> Tensor:
        """Return the logits of the last call, which are then forgotten with their graph."""
        logits_BLE, self.logits_BLE = self.logits_BLE, None
        assert logits_BLE is not None
        return logits_BLE


def over_tokens(local: Tensor, tokens: Tensor) -> Tensor:
    """Return the sum of a number over all tokens of the windows.

    Args:
        local: The number for this rank's tokens.
        tokens: (B, L, …), sharded over tokens, whole on every rank, or plain.
    """
    if not isinstance(tokens, DTensor):
        return local
    parts = [Partial() if place.is_shard(1) else place for place in tokens.placements]
    return DTensor.from_local(local, tokens.device_mesh, parts, run_check=False).full_tensor()


def all_tokens(local_BL: Tensor, tokens: Tensor) -> Tensor:
    """Return a number of every token on all ranks; arguments as in `over_tokens`."""
    if not isinstance(tokens, DTensor):
        return local_BL
    mesh, places = tokens.device_mesh, tokens.placements
    return DTensor.from_local(local_BL, mesh, places, run_check=False).full_tensor()


class LoopMoE(MoE):
    """torchtitan's mixture, with a router for all steps or for each, that reports its routing.

    Attributes:
        expert_bias_SE: b of each router; `balance` moves it, no gradient does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """Experts, their router, and the number of routers; the last serves all further steps."""

        routers: int = 1

        @property
        def active_elements(self) -> int:
            """Number of weights that a token is multiplied by."""
            experts, shared = self.routed_experts.inner_experts, self.shared_experts
            used = 3 * experts.dim * experts.hidden_dim * self.router.top_k
            used += experts.dim * self.num_experts
            return used + (0 if shared is None else 3 * experts.dim * shared.w1.out_features)

        @property
        def idle_elements(self) -> int:
            """Number of weights in the experts that a token does not visit."""
            experts = self.routed_experts.inner_experts
            return 3 * experts.dim * experts.hidden_dim * (self.num_experts - self.router.top_k)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.later_routers = ModuleList(config.router.build() for _ in range(config.routers - 1))
        bias_SE = torch.zeros(config.routers, config.num_experts)
        self.register_buffer("expert_bias_SE", bias_SE, persistent=True)

    def forward(  # type: ignore[override]
        self, x_BLD: Tensor, step: int | Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Return y, (B, L, D), and the visit's routing.

        Args:
            step: Recurrent step from 1, or a (B,) tensor of them; None outside the loop.
        """
        chosen_BLK, expert_BLK, scores_BLE, logits_BLE = self._route(x_BLD, step)
        score_BLE, logit_BLE = local_part(scores_BLE), local_part(logits_BLE)
        load_BE = torch.zeros_like(score_BLE[:, 0], dtype=torch.int64)
        number = local_part(expert_BLK).flatten(1)
        load_BE = load_BE.scatter_add(1, number, torch.ones_like(number))
        out_BLD = self.routed_experts(x_BLD, chosen_BLK, expert_BLK, load_BE.sum(0))
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        share_BE = (score_BLE / score_BLE.sum(-1, keepdim=True)).mean(1)
        load_BE, share_BE = over_tokens(load_BE, scores_BLE), over_tokens(share_BE, scores_BLE)
        share_BE = share_BE * (score_BLE.shape[1] / scores_BLE.shape[1])
        # Loads of all experts add up to k·L.
        balance_B = (load_BE / load_BE.sum(1, keepdim=True) * share_BE).sum(1) * load_BE.shape[1]
        z_BL = all_tokens(logit_BLE.float().logsumexp(-1).square(), logits_BLE)
        return out_BLD, Routing(load_BE.sum(0), balance_B, z_BL)

    def _route(self, x_BLD: Tensor, step: int | Tensor | None) -> tuple[Tensor, ...]:
        """Return scores and numbers of the chosen experts (B, L, K), all scores, all logits."""
        if isinstance(step, Tensor) and self.later_routers:
            routers = len(self.expert_bias_SE)
            found = zip(*(self._route(x_BLD, number + 1) for number in range(routers)), strict=True)
            router_B, row_B = step.clamp(max=routers) - 1, torch.arange(len(step)).to(step.device)
            return tuple(torch.stack(by_router)[router_B, row_B] for by_router in found)
        index = min(step, len(self.expert_bias_SE)) - 1 if isinstance(step, int) else 0
        router = self.later_routers[index - 1] if index else self.router
        assert isinstance(router, TokenChoiceTopKRouter)
        assert isinstance(router.gate, RouterGate)
        return *router(x_BLD, self.expert_bias_SE[index]), router.gate.take_logits()

    @torch.no_grad()
    def balance(self, load_SE: Tensor, rate: Tensor | float) -> None:
        """Raise b of experts with less than the mean load, and lower b of experts with more.

            b ← b + u (d − mean d),   d = sign(mean load − load)

        Args:
            load_SE: Tokens of a whole training step that chose each expert, by router.
            rate: u.

        Source: Wang et al. 2024, arXiv 2408.15664, Algorithm 1; the centring is torchtitan's.
        """
        if not self.router.gate.weight.requires_grad:
            return  # a frozen model keeps its choices
        load_SE = load_SE.float()
        direction_SE = (load_SE.mean(1, keepdim=True) - load_SE).sign()
        moved_SE = rate * (direction_SE - direction_SE.mean(1, keepdim=True))
        local_part(self.expert_bias_SE).add_(moved_SE)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        shape, device = self.expert_bias_SE.shape, buffer_device or self.expert_bias_SE.device
        self.expert_bias_SE = torch.zeros(shape, device=device)
