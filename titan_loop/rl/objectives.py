"""Objectives of rewards, as functions of log-probabilities.

Shape suffixes: P prompts, G answers a prompt, T tokens in any arrangement.

Sources: GRPO: Shao et al. 2024, arXiv 2402.03300, §4.1. DAPO: Yu et al. 2025, arXiv 2503.14476, §3.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Normaliser: TypeAlias = Literal["sequence", "group", "batch"]


def group_advantages(reward_PG: Tensor, judged_PG: Tensor) -> Tensor:
    """Return (r − mean r) / std r of each group, (P, G); 0 in a group whose rewards are equal.

    Answers that were not judged have 0, and count in neither mean nor std.
    Source: GRPO, §4.1.2. std is the unbiased estimate, as in TRL; the paper does not say.
    """
    told_PG = reward_PG.masked_fill(~judged_PG, torch.nan)
    centred_PG = told_PG - told_PG.nanmean(dim=-1, keepdim=True)
    judged_P1 = judged_PG.sum(dim=-1, keepdim=True)
    spread_P1 = (centred_PG.square().nansum(dim=-1, keepdim=True) / (judged_P1 - 1)).sqrt()
    # Equal rewards differ from their mean by rounding.
    learns_PG = judged_PG & has_spread(reward_PG, judged_PG).unsqueeze(-1)
    return torch.where(learns_PG, centred_PG / spread_P1, 0.0)


def has_spread(reward_PG: Tensor, judged_PG: Tensor) -> Tensor:
    """Return which groups have different rewards, (P,): the others teach nothing (DAPO, Eq. 11)."""
    most_P = reward_PG.masked_fill(~judged_PG, -torch.inf).amax(dim=-1)
    return most_P > reward_PG.masked_fill(~judged_PG, torch.inf).amin(dim=-1)


def token_weights(length_PG: Tensor, normaliser: Normaliser) -> Tensor:
    """Return the weight of every token of an answer, (P, G): an objective is a weighted sum.

    | normaliser | weight | source |
    |---|---|---|
    | sequence | 1 / (P G ‖o‖) | GRPO, Eq. 3 |
    | group | 1 / (P Σ_group ‖o‖) | DAPO, Eq. 8 |
    | batch | 1 / Σ_all ‖o‖ | TRL's `loss_type="dapo"` |

    Args:
        length_PG: Number of tokens of each answer; 0 for an answer that is left out, whose weight
            is 0.
    """
    length_PG = length_PG.double()
    prompts, answers = length_PG.shape
    if normaliser == "sequence":
        return torch.where(length_PG > 0, 1 / (prompts * answers * length_PG.clamp(min=1)), 0.0)
    total = length_PG.sum(dim=-1, keepdim=True) * prompts
    if normaliser == "batch":
        total = length_PG.sum().expand(prompts, 1)
    return torch.where(length_PG > 0, 1 / total.clamp(min=1), 0.0)


def clipped_loss(
    log_prob_T: Tensor,
    old_log_prob_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) of every token, with ρ = π / π_old.

    Source: GRPO, Eq. 3, with ε_low = ε_high; DAPO, Eq. 8 and §3.1, with 0.2 and 0.28.
    """
    ratio_T = (log_prob_T - old_log_prob_T).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def kl_estimate(log_prob_T: Tensor, parent_log_prob_T: Tensor) -> Tensor:
    """Return an unbiased estimate of KL(π ‖ π_parent) from a token that π drew, at least 0.

        π_parent / π − log(π_parent / π) − 1

    Source: GRPO, Eq. 4.
    """
    log_ratio_T = parent_log_prob_T - log_prob_T
    return log_ratio_T.exp() - log_ratio_T - 1


def overlong_penalty(length: Tensor, *, most: int, buffer: int) -> Tensor:
    """Return the reward of an answer's length, from 0 to −1.

        0 if ‖y‖ ≤ L − c;   (L − c − ‖y‖) / c up to L;   −1 beyond

    Args:
        most: L, tokens that an answer may have.
        buffer: c, tokens before L in which the penalty grows; at least 1.

    Source: DAPO, Eq. 13.
    """
    return ((most - buffer - length.double()) / buffer).clamp(-1.0, 0.0)


def trajectory_log_prob(log_prob_RT: Tensor, weight_RT: Tensor) -> Tensor:
    """Return Σ_r ω_r log π_r, which takes the place of log π in an objective.

    Args:
        weight_RT: ω, which sums to 1 over steps.

    Source: RLTT, arXiv 2602.10520.
    """
    return (weight_RT * log_prob_RT).sum(dim=0)
