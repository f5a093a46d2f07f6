"""Distillation, streamed like the cross entropy: states learn the distribution of a teacher.

    loss = 1/N Σ_s Σ_i w_si [ (1 − α) CE_si + α KL_si ]
    KL_si = Σ_v q_iv (log q_iv − log p_siv),   q = softmax(W_t t_i),   p_s = softmax(W h_si)

Only one chunk of a student's and of the teacher's logits exists at a time, never a tensor of L × V.
Where ranks share the vocabulary, each computes its slice of both.

Source: Hinton et al. 2015, arXiv 1503.02531, with temperature 1.

Shape suffixes: S students' states, B batch, L sequence, D width, V vocabulary, T = B·L tokens, C
tokens of one chunk.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.models.initialisation import local_part
from titan_loop.models.readout import GradientsInForward, LMHead, Taken
from titan_loop.models.vocabulary import Vocabulary


class Targets(NamedTuple):
    """The labels and the teacher of a distilled loss.

    `share` is α and `valid_tokens` N. `teacher_VD` is the teacher's whole head W_t; None for the
    students' own.
    """

    labels_BL: Tensor
    share: float
    valid_tokens: Tensor | float
    teacher_VD: Tensor | None = None


class Distilled(NamedTuple):
    """The scalar loss, and its terms by student and token in nats, (S, B, L), detached."""

    loss: Tensor
    ce_SBL: Tensor
    kl_SBL: Tensor


def distilled_loss(
    readout: LMHead,
    hidden_SBLD: Sequence[Tensor],
    teacher_BLD: Tensor,
    targets: Targets,
    weight_SBL: Tensor | None = None,
) -> Distilled:
    """Return the loss, differentiable in the students' states and the head.

    The teacher's state t and the weights w (None for ones) are constants.
    """
    teacher_BLD = local_part(teacher_BLD).detach()

    def stream(weight_VD: Tensor, states: tuple[Tensor, ...], head: LMHead) -> Any:
        compute = partial(_stream, head, weight_VD, states, teacher_BLD, weight_SBL, targets)
        return GradientsInForward.apply(compute, weight_VD, *states)

    return Distilled(*readout(tuple(hidden_SBLD), through=stream))


def _stream(
    head: LMHead,
    weight_VD: Tensor,
    hidden_SBLD: tuple[Tensor, ...],
    teacher_BLD: Tensor,
    weight_SBL: Tensor | None,
    targets: Targets,
    needed: Sequence[bool],
) -> Taken:
    vocabulary, chunk = head.vocabulary, head.chunk_tokens
    teacher_TD, *hidden_STD = (
        state_BLD.reshape(-1, state_BLD.shape[-1]) for state_BLD in (teacher_BLD, *hidden_SBLD)
    )
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    labels_T, share = targets.labels_BL.reshape(-1), targets.share
    rows = slice(vocabulary.start, vocabulary.start + weight_VD.shape[0])
    teacher_VD = weight_VD if targets.teacher_VD is None else targets.teacher_VD[rows]
    hidden_grad_STD = [torch.empty_like(hidden_TD) for hidden_TD in hidden_STD]
    weight_grad_VD = torch.zeros_like(weight_VD, dtype=wide) if needed[0] else None
    weight_ST = labels_T.new_ones(len(hidden_STD), len(labels_T), dtype=wide)
    ce_ST, kl_ST = torch.zeros_like(weight_ST), torch.zeros_like(weight_ST)
    if weight_SBL is not None:
        weight_ST = weight_SBL.reshape(weight_ST.shape).to(wide)
    for start in range(0, len(labels_T), chunk):
        part = slice(start, start + chunk)
        teacher_CD = teacher_TD[part].to(weight_VD.dtype)
        log_q_CV = _log_softmax(head.shaped((teacher_CD @ teacher_VD.t()).to(wide)), vocabulary)
        for s, hidden_TD in enumerate(hidden_STD):
            hidden_CD = hidden_TD[part].to(weight_VD.dtype)
            logits_CV = head.shaped((hidden_CD @ weight_VD.t()).to(wide))
            log_p_CV = _log_softmax(logits_CV, vocabulary)
            gradient_CV, ce_ST[s, part], kl_ST[s, part] = _gradient(
                log_p_CV, log_q_CV, labels_T[part], share, vocabulary
            )
            gradient_CV = head.unshaped_(gradient_CV, logits_CV)
            gradient_CV *= weight_ST[s, part].unsqueeze(-1)
            gradient_CV = (gradient_CV / targets.valid_tokens).to(weight_VD.dtype)
            hidden_grad_STD[s][part] = gradient_CV @ weight_VD
            if weight_grad_VD is not None:
                weight_grad_VD += gradient_CV.t() @ hidden_CD
    loss = (weight_ST * ((1 - share) * ce_ST + share * kl_ST)).sum() / targets.valid_tokens
    shape = len(hidden_STD), *targets.labels_BL.shape
    if weight_grad_VD is not None:
        weight_grad_VD = weight_grad_VD.to(weight_VD.dtype)
    hidden_grads = (grad_TD.view(teacher_BLD.shape) for grad_TD in hidden_grad_STD)
    return loss, (ce_ST.view(shape), kl_ST.view(shape)), (weight_grad_VD, *hidden_grads)


def _log_softmax(logits_CV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return this device's columns of the log-softmax over the whole vocabulary."""
    max_C1 = logits_CV.amax(dim=-1, keepdim=True)
    vocabulary.all_reduce_max(max_C1)
    logits_CV = logits_CV - max_C1
    (sum_C,) = vocabulary.all_reduce_sum(logits_CV.exp().sum(dim=-1))
    return logits_CV - sum_C.log().unsqueeze(-1)


def _gradient(
    log_p_CV: Tensor, log_q_CV: Tensor, labels_C: Tensor, share: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d loss / d logits, and CE and KL of each token; all are 0 at ignored labels."""
    valid_C = labels_C != IGNORE_INDEX
    local_C = labels_C - vocabulary.start
    here_C = valid_C & (local_C >= 0) & (local_C < log_p_CV.shape[-1])
    index_C1 = torch.where(here_C, local_C, 0).unsqueeze(-1)
    q_CV = log_q_CV.exp()
    ce_C = -torch.where(here_C, log_p_CV.gather(-1, index_C1).squeeze(-1), 0.0)
    kl_C = (q_CV * (log_q_CV - log_p_CV)).sum(dim=-1)
    ce_C, kl_C = vocabulary.all_reduce_sum(ce_C, kl_C)
    gradient_CV = log_p_CV.exp() - share * q_CV
    hit_C1 = here_C.to(gradient_CV.dtype).unsqueeze(-1) * (1 - share)
    gradient_CV.scatter_add_(-1, index_C1, -hit_C1)
    gradient_CV *= valid_C.unsqueeze(-1)
    return gradient_CV, torch.where(valid_C, ce_C, 0.0), torch.where(valid_C, kl_C, 0.0)
