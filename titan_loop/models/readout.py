"""The language-model head: hidden state → logits; states of all recurrent steps → loss.

    h_r ─┬─ chunk of tokens ─ logits ─ CE_r ─ gradient of the logits ─┬─ gradient of h_r
         └─ next chunk …        (overwritten in place)                └─ + gradient of the head

The weights of Σ_r w_r CE_r are known before any logits exist, so each chunk's gradients are taken
at once and its logits are dropped: nothing larger than chunk × V, the head weight or a hidden state
ever lives. All of this runs *inside* the head's forward, so FSDP gathers the weight once per call.
Where ranks share the vocabulary, `titan_loop/distributed/vocabulary_parallel.py` gives the head its
`Vocabulary`.

Shape suffixes: R recurrent steps, B batch, L sequence, D width, V vocabulary (of this rank's slice
inside the chunk loop), T = B·L tokens, C tokens of one chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.common.linear import Linear

from titan_loop.errors import UserError
from titan_loop.models.vocabulary import Vocabulary


class LMHead(Linear):
    """A bias-free linear map to the vocabulary that can also return the loss without the logits.

    With the labels, `head(hidden_RBLD, labels_BL=…, weight_RBL=…)` computes

        CE_r = −log softmax(W h_r)[label]        loss = Σ_{r, b, l} w_r (CE_r + ζ z_r²)
        z_r = log Σ_v exp(W h_r)_v

    The z-loss keeps the logits from drifting and costs no pass of its own. In it w_r is a constant,
    so that no gate learns to prefer a step for its small logits.

    Source: the streaming is ours; CE_r is Ouro, arXiv 2510.25741, §3.1 Eq. 2, per token; z-loss:
        Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, §5.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_tokens: int = 2048
        """Tokens whose logits exist at the same time in the streamed loss: chunk_tokens · V · (4 +
        2) bytes in bf16 training, 0.6 GB at V = 49,152. On two CPU cores the time is flat from 256
        up. A GPU wants more: each chunk moves the fp32 gradient of the head once, 12·V·D bytes
        against 6·chunk·V·D FLOPs."""

        scale: float = 1.0
        """Factor on the logits W h."""

        softcap: float = 0.0
        """c of c·tanh(s/c) in place of every scaled logit s; 0 for none."""

    def __init__(self, config: Config):
        if config.bias:
            raise UserError("lm_head.bias=True: the head has no bias; set it to False")
        if config.chunk_tokens < 1:
            raise UserError(f"lm_head.chunk_tokens={config.chunk_tokens}: must be at least 1")
        super().__init__(config)
        self.chunk_tokens = config.chunk_tokens
        self.vocabulary = Vocabulary(config.out_features)
        self.scale, self.softcap = config.scale, config.softcap

    def shaped(self, logits: Tensor) -> Tensor:
        """Return W h, of any shape, scaled and capped."""
        if self.scale != 1:
            logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def unshaped_(self, gradient: Tensor, shaped: Tensor) -> Tensor:
        """Turn the gradient of `shaped` logits into the gradient of W h, in place."""
        if self.softcap:
            gradient.mul_(1 - (shaped / self.softcap).square())
        return gradient if self.scale == 1 else gradient.mul_(self.scale)

    # Keyword-only: torchtitan's `Module.parallelize` demands a value for every positional argument.
    def forward(
        self,
        input: Tensor | Sequence[Tensor],
        *,
        labels_BL: Tensor | None = None,
        weight_RBL: Tensor | None = None,
        z_loss: float = 0.0,
        rows_T: Tensor | None = None,
        through: "Through | None" = None,
    ) -> Any:
        """Return logits for one hidden state, or the weighted loss for several steps' states.

        Args:
            input: One (B, L, D) hidden state, or a tuple of R; whole on tensor-parallel ranks.
            labels_BL: Next-token ids, int64; `IGNORE_INDEX` has neither loss nor gradient.
            weight_RBL: Weights w_r, fp32 or float64, equal on all tensor-parallel ranks.
            rows_T: Indices, among the B·L tokens, of all that have a label; the others then cost
                nothing. None computes every token, which is faster where most have one.
            through: Function that replaces the streaming. It takes this device's rows of the
                weight, the states and this head; its result is returned.

        Returns:
            (B, L, V) logits without labels. With labels the scalar weighted loss,
            differentiable in states, head weight and `weight_RBL`, and CE_r per token in nats,
            (R, B, L), detached, 0 at ignored labels. Both are at least fp32, plain tensors, and
            equal on all tensor-parallel ranks.
        """
        if isinstance(input, Tensor):
            return self.shaped(super().forward(input))
        if through is not None:
            return through(*self.vocabulary.local(self.weight, input), self)
        assert labels_BL is not None, "a tuple of states needs labels"
        assert weight_RBL is not None, "a tuple of states needs loss weights"
        if weight_RBL.dtype not in (torch.float32, torch.float64):
            problem = f"weight_RBL is {weight_RBL.dtype}: loss weights must stay fp32"
            fix = "set cast_forward_inputs=False in the head's MixedPrecisionPolicy"
            raise TypeError(f"{problem}; {fix}")
        head_weight_VD, hidden_RBLD = self.vocabulary.local(self.weight, input)
        how = self, z_loss, rows_T
        stream = partial(_stream, hidden_RBLD, head_weight_VD, labels_BL, weight_RBL, *how)
        if torch.is_grad_enabled():
            return GradientsInForward.apply(stream, head_weight_VD, weight_RBL, *hidden_RBLD)
        loss, (ce_RBL,), _ = stream([False] * (2 + len(hidden_RBLD)))
        return loss, ce_RBL


Through = Callable[[Tensor, tuple[Tensor, ...], LMHead], tuple[Tensor, ...]]


Taken = tuple[Tensor, tuple[Tensor, ...], Sequence[Tensor | None]]
"""A scalar loss, further results without a gradient, and the loss's gradient for each input."""


class GradientsInForward(torch.autograd.Function):
    """Computes the gradients of a scalar loss in its forward; its backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[Sequence[bool]], Taken], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the loss and the other results; `compute` is told which inputs need a gradient."""
        loss, results, gradients = compute(ctx.needs_input_grad[1:])
        ctx.dtypes = [each.dtype for each in inputs]
        ctx.mark_non_differentiable(*results)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*gradients)
        return loss, *results

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator is untyped
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the saved gradients, multiplied by the gradient of the loss."""
        grad_loss = grad_outputs[0]
        if grad_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        # Out of place: a second backward (retain_graph) finds the saved gradients unchanged.
        # Skipping it when grad_loss == 1 would make the host wait for the device.
        scaled = (
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, *scaled


def _stream(
    hidden_RBLD: Sequence[Tensor],
    head_weight_VD: Tensor,
    labels_BL: Tensor,
    weight_RBL: Tensor,
    head: LMHead,
    z_loss: float,
    rows_T: Tensor | None,
    needed: Sequence[bool],
) -> Taken:
    """Visit every recurrent step and chunk once; return the loss, CE_r and gradients.

    The gradients are of the head weight, the loss weights and each state, as far as `needed`.
    """
    assert len(hidden_RBLD) == len(weight_RBL), "one weight per recurrent step"
    chunk_tokens, vocabulary = head.chunk_tokens, head.vocabulary
    plain = head.scale == 1 and not head.softcap
    needs_head_weight, needs_weight, *needs_hidden = needed
    compute_dtype = head_weight_VD.dtype
    loss_dtype = torch.promote_types(compute_dtype, torch.float32)
    labels_T = labels_BL.reshape(-1)
    weight_RT = weight_RBL.reshape(len(hidden_RBLD), -1).to(loss_dtype)
    # An ignored label must not pass on a weight that is not finite, as 0 · inf would.
    weight_RT = torch.where(labels_T != IGNORE_INDEX, weight_RT, 0.0)
    ce_RT = torch.zeros_like(weight_RT)
    log_sum_RT = torch.zeros_like(weight_RT)
    tokens = labels_T.shape[0]
    chunks = (
        [slice(start, start + chunk_tokens) for start in range(0, tokens, chunk_tokens)]
        if rows_T is None
        else rows_T.split(chunk_tokens)
    )
    # Memory of this size is mapped anew at every allocation on CPU: all chunks share one buffer.
    rows = min(chunk_tokens, tokens if rows_T is None else len(rows_T))
    logits_buffer_CV = head_weight_VD.new_empty(rows, head_weight_VD.shape[0])
    head_weight_grad_VD = (
        torch.zeros_like(head_weight_VD, dtype=loss_dtype) if needs_head_weight else None
    )
    allocate = torch.empty_like if rows_T is None else torch.zeros_like
    hidden_grad_RBLD: list[Tensor | None] = [
        allocate(hidden_BLD, memory_format=torch.contiguous_format) if needed else None
        for hidden_BLD, needed in zip(hidden_RBLD, needs_hidden, strict=True)
    ]
    for r, hidden_BLD in enumerate(hidden_RBLD):
        hidden_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
        hidden_grad_BLD = hidden_grad_RBLD[r]
        for chunk in chunks:
            hidden_CD = hidden_TD[chunk].to(compute_dtype)
            buffer_CV = logits_buffer_CV[: hidden_CD.shape[0]]
            logits_CV = torch.mm(hidden_CD, head_weight_VD.t(), out=buffer_CV)
            shaped_CV = logits_CV
            if not plain:
                logits_CV.copy_(head.shaped(logits_CV))
                shaped_CV = logits_CV.clone()
            needs_gradient = hidden_grad_BLD is not None or head_weight_grad_VD is not None
            ce_RT[r, chunk], log_sum_RT[r, chunk] = _cross_entropy_to_gradient_(
                logits_CV, labels_T[chunk], weight_RT[r, chunk], vocabulary, z_loss, needs_gradient
            )
            logits_grad_CV = logits_CV  # overwritten
            if needs_gradient and not plain:
                logits_grad_CV = head.unshaped_(logits_grad_CV, shaped_CV)
            if hidden_grad_BLD is not None:
                hidden_grad_BLD.view(hidden_TD.shape)[chunk] = torch.mm(
                    logits_grad_CV, head_weight_VD
                )
            if head_weight_grad_VD is None:
                continue
            if loss_dtype == compute_dtype:
                head_weight_grad_VD.addmm_(logits_grad_CV.t(), hidden_CD)
            else:
                head_weight_grad_VD += torch.mm(logits_grad_CV.t(), hidden_CD)
    if head_weight_grad_VD is not None:
        head_weight_grad_VD = head_weight_grad_VD.to(compute_dtype)
    loss = (weight_RT * ce_RT).sum()
    if z_loss:
        loss = loss + z_loss * (weight_RT * log_sum_RT.square()).sum()
    ce_RBL = ce_RT.view(weight_RBL.shape)
    weight_grad_RBL = ce_RBL if needs_weight else None
    return loss, (ce_RBL,), (head_weight_grad_VD, weight_grad_RBL, *hidden_grad_RBLD)


def _cross_entropy_to_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    weight_C: Tensor,
    vocabulary: Vocabulary,
    z_loss: float,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return CE and Z, (C,); overwrite the logits with the gradient of weight · (CE + ζ Z²).

        CE = log Σ_v exp(z_v − m) − (z_label − m)        dCE/dz_v = softmax(z)_v − [v = label]
        Z = log Σ_v exp(z_v − m) + m                     dZ²/dz_v = 2 Z softmax(z)_v

    Where ranks share the vocabulary, m and then (Σ exp, z_label − m) are all-reduced, so CE and Z
    are equal on all of them. At ignored labels both are 0, and the weights must be 0. The softmax
    is computed in the weights' dtype.
    """
    rows = logits_CV.shape[-1]
    valid_C = labels_C != IGNORE_INDEX
    local_label_C = labels_C - vocabulary.start
    here_C = valid_C & (local_label_C >= 0) & (local_label_C < rows)
    # A label outside the whole vocabulary keeps an index that `gather` rejects.
    outside_C = valid_C & ((labels_C < 0) | (labels_C >= vocabulary.rows))
    index_C1 = torch.where(here_C, local_label_C, torch.where(outside_C, rows, 0)).unsqueeze(-1)

    wide_CV = logits_CV.to(weight_C.dtype)  # the logits themselves where the dtypes agree
    max_C1 = wide_CV.amax(dim=-1, keepdim=True)
    vocabulary.all_reduce_max(max_C1)
    wide_CV.sub_(max_C1)
    label_logit_C = torch.where(here_C, wide_CV.gather(-1, index_C1).squeeze(-1), 0.0)
    exp_CV = wide_CV.exp_()
    sum_exp_C = exp_CV.sum(dim=-1)
    sum_exp_C, label_logit_C = vocabulary.all_reduce_sum(sum_exp_C, label_logit_C)
    log_sum_C = sum_exp_C.log()
    ce_C = torch.where(valid_C, log_sum_C - label_logit_C, 0.0)
    log_sum_C = torch.where(valid_C, log_sum_C + max_C1.squeeze(-1), 0.0)
    if not needs_gradient:
        return ce_C, log_sum_C

    softmax_weight_C = weight_C * (1 + 2 * z_loss * log_sum_C) if z_loss else weight_C
    exp_CV.mul_((softmax_weight_C / sum_exp_C).unsqueeze(-1))
    exp_CV.scatter_add_(-1, index_C1, -torch.where(here_C, weight_C, 0.0).unsqueeze(-1))
    logits_CV.copy_(exp_CV)  # nothing to do where the dtypes agree
    return ce_C, log_sum_C
