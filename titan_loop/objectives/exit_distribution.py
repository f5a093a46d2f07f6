"""The distribution over exit steps that gate logits define, and its summaries.

The functions take `exit_logit_RBL`, the gate logits stacked over R recurrent steps, and compute in
fp32 (float64 stays float64) and in log space, so logits of any size give finite values and
gradients. Any dimensions may follow the first.

Source: Ouro, Zhu et al. 2025, arXiv 2510.25741, §3.2 and §3.3.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.errors import UserError


def exit_log_pmf(exit_logit_RBL: Tensor) -> Tensor:
    """Return log p_r in nats, the log-probability of exiting exactly at each recurrent step.

        λ_r = sigmoid(g_r)        S_r = Π_{j≤r} (1 − λ_j),  S_0 = 1
        p_r = λ_r S_{r−1}  for r < R        p_R = S_{R−1}

    g_r is `exit_logit_RBL[r - 1]`, ±inf is allowed. The last step takes the remaining mass, so g_R
    has a gradient of zero; it is not absent, which keeps the gate in the autograd graph when R = 1.

    Source: Eq. 3.
    """
    logit_RBL = exit_logit_RBL.to(torch.promote_types(exit_logit_RBL.dtype, torch.float32))
    log_continue_RBL = F.logsigmoid(-logit_RBL)
    # Shifted by one step instead of subtracted, which would give inf − inf for a saturated gate.
    log_survival_before_RBL = torch.cat(
        [torch.zeros_like(log_continue_RBL[:1]), log_continue_RBL[:-1].cumsum(dim=0)]
    )
    step_R = _steps(logit_RBL)
    log_exit_RBL = torch.where(step_R == logit_RBL.shape[0], 0.0, F.logsigmoid(logit_RBL))
    return log_survival_before_RBL + log_exit_RBL


def exit_pmf(exit_logit_RBL: Tensor) -> Tensor:
    """Return p_r, the probability of exiting exactly at each recurrent step."""
    return exit_log_pmf(exit_logit_RBL).exp()


def reaches_threshold(log_survival: Tensor, threshold: float) -> Tensor:
    """Return where the CDF of the exit distribution reaches the Q-exit threshold q in [0, 1].

        t_exit = min { m in 1..R : CDF(m) ≥ q }        CDF(m) = 1 − S_m for m < R, CDF(R) = 1
        CDF(m) ≥ q  ⟺  log S_m ≤ log (1 − q)

    The right-hand form is computed: in fp32 a CDF near 1 rounds to 1, which would make q = 1 exit
    early. Every token exits at step R, whatever this returns there.

    Source: §3.2. The section prints ≥ and the caption of Figure 3 prints >; we use ≥.
    """
    return log_survival <= (-math.inf if threshold == 1.0 else math.log1p(-threshold))


def exit_entropy_nats(exit_logit_RBL: Tensor) -> Tensor:
    """Return the entropy H(p) = −Σ_r p_r log p_r, in [0, log R] (Eq. 4)."""
    pmf_RBL, finite_log_pmf_RBL = _pmf_and_finite_log(exit_logit_RBL)
    return -(pmf_RBL * finite_log_pmf_RBL).sum(dim=0)


def mean_exit_step(exit_logit_RBL: Tensor) -> Tensor:
    """Return the expected exit step Σ_r r · p_r in [1, R], without the first dimension."""
    pmf_RBL = exit_pmf(exit_logit_RBL)
    return (_steps(pmf_RBL) * pmf_RBL).sum(dim=0)


def geometric_prior(
    recurrent_steps: int, eta: float, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the geometric prior, cut at R steps and renormalised: (R,), fp32.

        π_r = η(1−η)^{r−1} / Σ_{j≤R} η(1−η)^{j−1}

    Larger η in (0, 1) put more mass on shallow steps; η → 0 is the uniform prior.

    Source: Appendix A and Figure 10.
    Deviations: the paper does not say where the mass beyond R goes. On the last step it would make
        a small η prefer *deep* steps, against the caption, whose limit is the uniform prior.
    """
    if not 0.0 < eta < 1.0:
        raise UserError(f"geometric_eta={eta}: choose a value strictly between 0 and 1")
    step_R = torch.arange(recurrent_steps, dtype=torch.float64, device=device)
    return torch.softmax(step_R * torch.log1p(-torch.tensor(eta).double()), dim=0).float()


def kl_to_prior(exit_logit_RBL: Tensor, prior_R: Tensor) -> Tensor:
    """Return KL(p ‖ π) = Σ_r p_r (log p_r − log π_r) in nats, without the first dimension.

    `prior_R` has strictly positive probabilities. With the uniform prior this is log R − H(p).

    Source: the negative ELBO after Eq. 4, and Appendix A.
    """
    pmf_RBL, finite_log_pmf_RBL = _pmf_and_finite_log(exit_logit_RBL)
    log_prior_RBL = prior_R.to(pmf_RBL).log().view(-1, *[1] * (pmf_RBL.ndim - 1))
    return (pmf_RBL * (finite_log_pmf_RBL - log_prior_RBL)).sum(dim=0)


def _steps(like_RBL: Tensor) -> Tensor:
    """Return 1..R shaped to broadcast against `like_RBL`."""
    step_R = torch.arange(1, like_RBL.shape[0] + 1, device=like_RBL.device, dtype=like_RBL.dtype)
    return step_R.view(-1, *[1] * (like_RBL.ndim - 1))


def _pmf_and_finite_log(exit_logit_RBL: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and log p, with 0 for log p where p is 0: p · log p must be 0, not NaN."""
    log_pmf_RBL = exit_log_pmf(exit_logit_RBL)
    pmf_RBL = log_pmf_RBL.exp()
    return pmf_RBL, torch.where(pmf_RBL > 0, log_pmf_RBL, 0.0)
