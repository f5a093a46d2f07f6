"""From logits to a token: temperature, top-k, top-p, and a draw from given uniform numbers.

Every row draws its uniform numbers from its own generator, so its samples do not depend on its
neighbours or on the order in which rows leave the recurrence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_loop.errors import UserError
from titan_loop.inference.measures import at_least_fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Choice of a token; by default greedy. Raises `UserError` for a value out of range.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; None for all.
        top_p: Probability that the most likely tokens to draw from must reach together.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature={self.temperature} must be 0 (greedy) or a positive number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1; leave it out for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that `sampling` draws from, (…, V), at least fp32.

    Top-k comes before top-p, which applies to the probabilities after temperature and top-k.
    """
    wide = at_least_fp32(logits)
    if sampling.temperature == 0.0:
        return torch.zeros_like(wide).scatter(-1, wide.argmax(-1, keepdim=True), 1.0)
    # Neither the logits nor the temperature may leave the dtype's range.
    temperature = max(sampling.temperature, torch.finfo(wide.dtype).tiny)
    wide = (wide - wide.amax(-1, keepdim=True)) / temperature
    if sampling.top_k is not None and sampling.top_k < wide.shape[-1]:
        smallest = wide.topk(sampling.top_k).values[..., -1:]
        wide = wide.masked_fill(wide < smallest, -torch.inf)
    kept = wide.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, index = kept.sort(-1, descending=True)
        # A token stays if the tokens before it do not reach p yet; the most likely one always does.
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        kept = kept.masked_fill(dropped.scatter(-1, index, dropped), 0.0)
        kept = kept / kept.sum(-1, keepdim=True)
    return kept


def draw(weight: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the cumulative weight first exceeds the share `uniform`, int64.

    Args:
        weight: (…, V), not negative, of any sum. A token of weight 0 is never drawn.
        uniform: (…) in [0, 1).
    """
    cumulated = weight.double().cumsum(-1)
    total = cumulated[..., -1:]
    # Rounding up to the total would land after the last token of positive weight.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform.double().unsqueeze(-1) * total, below_total)
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1)
