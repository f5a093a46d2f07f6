"""Comparisons of the states and distributions after two recurrent steps, one token at a time.

Arithmetic is in at least fp32. Shape suffixes: B rows, L tokens, D width, V vocabulary.
"""

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities in nats, in at least fp32."""
    return at_least_fp32(logits).log_softmax(-1)


def hidden_distance(hidden_BLD: Tensor, before_BLD: Tensor) -> Tensor:
    """Return ‖h_r − h_{r−1}‖₂ per token, (B, L)."""
    return (at_least_fp32(hidden_BLD) - at_least_fp32(before_BLD)).norm(dim=-1)


def entropy_nats(log_prob_BLV: Tensor) -> Tensor:
    """Return H(P_r) per token, (B, L), from finite log-probabilities."""
    return -(log_prob_BLV.exp() * log_prob_BLV).sum(-1)


def logit_margin(logits: Tensor, token: Tensor) -> Tensor:
    """Return a token's logit minus the largest other: (…, V), (…) → (…), in fp32 or wider."""
    wide = at_least_fp32(logits)
    own = wide.gather(-1, token.unsqueeze(-1))
    others = wide.scatter(-1, token.unsqueeze(-1), -torch.inf)
    return own.squeeze(-1) - others.amax(-1)


def margin_change(log_prob_BLV: Tensor, log_prob_before_BLV: Tensor) -> Tensor:
    """Return |m_r − m_{r−1}| / m_r per token, (B, L).

    m is the lead in nats, after the given step, of the token that is likeliest after step r over
    the likeliest other one. It is negative at step r − 1 if another token led there.
    """
    top_BL = log_prob_BLV.argmax(-1)
    now_BL = logit_margin(log_prob_BLV, top_BL)
    return (now_BL - logit_margin(log_prob_before_BLV, top_BL)).abs() / now_BL
