"""Distillation: the loop learns the distribution of a teacher, streamed like the cross entropy.

    L = 1/N Σ_i [ (1 − α) CE_i + α KL_i ],   KL_i = Σ_v q_iv (log q_iv − log p_iv)
    q = softmax(W_t t_i),   p = softmax(W h_i)

| symbol | code |
|---|---|
| h, W | the last step's state and the head |
| t, W_t | the teacher's state and head |
| α | `share` |
| N | valid tokens of the global batch |

The teacher is a frozen dense model from a run, or the model itself at R = 1, whose state is then a
constant. A chunk of tokens has its logits twice, the student's and the teacher's; no tensor of
L × V exists. Where ranks share the vocabulary, each computes its rows of both.

Source: Hinton et al. 2015, arXiv 1503.02531, with temperature 1; for tied layers Bae et al. 2024,
arXiv 2410.20672, §2.5.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import CompileConfig
from torchtitan.config.configs import ParallelismConfig

from titan_loop.checkpoint import model as saved_model
from titan_loop.distributed.state_bytes import unit_sizes
from titan_loop.errors import Refusal, UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.family import decoder_config
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.models.vocabulary import Vocabulary
from titan_loop.objectives.streamed_loss import LossBatch, StreamedHead, StreamedLoss
from titan_loop.runs.saved_run import SavedRun


class Targets(NamedTuple):
    """What a distilled loss compares the student with.

    Attributes:
        labels_T: Next-token ids.
        teacher_TD: States of the teacher.
        teacher_VD: Head of the teacher, all rows; None for the student's own.
        share: α.
        valid_tokens: N.
    """

    labels_T: Tensor
    teacher_TD: Tensor
    teacher_VD: Tensor | None
    share: float
    valid_tokens: Tensor | float


class DistillationLoss(StreamedLoss):
    """Cross entropy of the last step, and its distance to a teacher's distribution."""

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """The teacher and its weight."""

        reads_tokens: ClassVar[bool] = True

        teacher: str = ""
        """A run or checkpoint with the same vocabulary, used at its own R; empty for the model
        itself at R = 1."""

        share: float = 1.0
        """α, the weight of the teacher; the rest is that of the labels."""

        def collect(self, *, exit_gate: bool) -> Collect:
            """Return the last step, or all where the first one is the teacher."""
            return "last" if self.teacher else "all"

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """Yield a share out of range, a gate, and a teacher that cannot be opened."""
            yield from StreamedLoss.Config.refusals(
                self, trainable=trainable, exit_gate=exit_gate, fewest_steps=fewest_steps
            )
            if not 0 <= self.share <= 1:
                yield Refusal.of("loss.share", self.share, "must be from 0 to 1")
            if exit_gate:
                problem = "has no effect on an exit gate: the last step alone is distilled"
                yield Refusal.of("loss", "DistillationLoss", problem, "set model.exit_gate=False")
            if self.teacher:
                try:
                    SavedRun.open(self.teacher).checkpoint()
                except UserError as error:
                    yield Refusal("loss.teacher", f"loss.teacher={self.teacher}: {error}")

        def model_refusals(self, model: LoopDecoder.Config) -> Iterator[Refusal]:
            """Yield a teacher of another vocabulary."""
            teacher = self._teacher()
            if teacher is not None and teacher.vocab_size != model.vocab_size:
                yield Refusal.of(
                    "loss.teacher",
                    self.teacher,
                    f"has a vocabulary of {teacher.vocab_size}, the model one of "
                    f"{model.vocab_size}",
                    "choose a teacher with the model's tokenizer",
                )

        def held_weights(self) -> int:
            """Return the number of the teacher's weights."""
            teacher = self._teacher()
            return 0 if teacher is None else sum(u.parameters() for u in unit_sizes(teacher))

        def _teacher(self) -> LoopDecoder.Config | None:
            """Return the architecture of a teacher that can be opened."""
            if not self.teacher:
                return None
            with suppress(UserError):  # `refusals` says it
                return decoder_config(SavedRun.open(self.teacher).model_options, max_seq_len=1)
            return None

        def parallelism_refusals(self, parallelism: ParallelismConfig) -> Iterator[Refusal]:
            """Yield context parallelism with a teacher of its own, which reads whole windows."""
            degree = parallelism.context_parallel_degree
            if degree > 1 and self.teacher:
                yield Refusal.of(
                    "parallelism.context_parallel_degree",
                    degree,
                    f"cuts the windows that loss.teacher={self.teacher} reads whole",
                    "leave it at 1",
                )

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config, compile_config=compile_config)
        self.share = config.share
        self._place = config.teacher
        self._teacher: LoopDecoder | None = None

    def compute(
        self, readout: StreamedHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one micro-batch; arguments as in `StreamedLoss`."""
        assert isinstance(readout, LMHead)
        last_BLD = output.hidden_RBLD[-1]
        teacher_VD = None
        if self._place:
            teacher_BLD, teacher_VD = self._taught(batch, last_BLD, readout.vocabulary)
        else:
            teacher_BLD = output.hidden_RBLD[0].detach()
        if isinstance(teacher_BLD, DTensor):
            teacher_BLD = teacher_BLD.to_local()
        targets = Targets(
            labels_T=batch.labels_BL.reshape(-1),
            teacher_TD=teacher_BLD.flatten(0, 1),
            teacher_VD=teacher_VD,
            share=self.share,
            valid_tokens=batch.valid_tokens,
        )
        loss, ce, kl = readout((last_BLD,), through=partial(_through, targets))
        last_step = output.first_step + len(output.hidden_RBLD) - 1
        return loss, {f"ce/step_{last_step}": ce, "distillation/kl": kl}

    @torch.no_grad()
    def _taught(
        self, batch: LossBatch, like: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Return the teacher's state and head, in the student's dtype."""
        tokens_BL, positions_BL = batch.columns["input"], batch.columns["positions"]
        if self._teacher is None:
            run = SavedRun.open(self._place)
            self._teacher = saved_model.load_model(
                run.checkpoint().path, run.model_options, max_seq_len=tokens_BL.shape[1]
            )
            self._teacher.requires_grad_(False).to(like.device, like.dtype)
            assert self._teacher.config.vocab_size == vocabulary.rows
        output = self._teacher(tokens_BL, positions_BL, collect="last")
        return output.hidden_RBLD[-1], self._teacher.lm_head.weight


def _through(
    targets: Targets, weight_VD: Tensor, states: tuple[Tensor, ...], head: LMHead
) -> tuple[Tensor, ...]:
    """Stream the loss where the head's weight is whole."""
    (hidden_BLD,) = states
    how = head.chunk_tokens, head.vocabulary
    return _Distilled.apply(weight_VD, hidden_BLD, targets, how)  # type: ignore[return-value]


class _Distilled(torch.autograd.Function):
    """Computes the gradients of the loss in its forward; its backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_VD: Tensor,
        hidden_BLD: Tensor,
        targets: Targets,
        how: tuple[int, Vocabulary],
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunk, vocabulary = how
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        hidden_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
        rows = slice(vocabulary.start, vocabulary.start + weight_VD.shape[0])
        teacher_VD = weight_VD if targets.teacher_VD is None else targets.teacher_VD[rows]
        hidden_grad_TD = torch.empty_like(hidden_TD)
        weight_grad_VD = (
            torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[0] else None
        )
        sums = torch.zeros(2, dtype=wide, device=hidden_BLD.device)
        for start in range(0, len(hidden_TD), chunk):
            part = slice(start, start + chunk)
            hidden_CD = hidden_TD[part].to(weight_VD.dtype)
            teacher_CD = targets.teacher_TD[part].to(weight_VD.dtype)
            log_q_CV = _log_softmax((teacher_CD @ teacher_VD.t()).to(wide), vocabulary)
            log_p_CV = _log_softmax((hidden_CD @ weight_VD.t()).to(wide), vocabulary)
            gradient_CV, ce_C, kl_C = _gradient(
                log_p_CV, log_q_CV, targets.labels_T[part], targets.share, vocabulary
            )
            sums += torch.stack([ce_C.sum(), kl_C.sum()])
            gradient_CV = (gradient_CV / targets.valid_tokens).to(weight_VD.dtype)
            hidden_grad_TD[part] = gradient_CV @ weight_VD
            if weight_grad_VD is not None:
                weight_grad_VD += gradient_CV.t() @ hidden_CD
        ce, kl = sums / targets.valid_tokens
        loss = (1 - targets.share) * ce + targets.share * kl
        if weight_grad_VD is not None:
            weight_grad_VD = weight_grad_VD.to(weight_VD.dtype)
        ctx.mark_non_differentiable(ce, kl)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight_grad_VD, hidden_grad_TD.view_as(hidden_BLD))
        return loss, ce, kl

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator is untyped
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_loss = grad_outputs[0]
        weight_grad_VD, hidden_grad_BLD = ctx.saved_tensors
        if grad_loss is None:
            return None, None, None, None
        scaled = [
            None if grad is None else (grad * grad_loss).to(grad.dtype)
            for grad in (weight_grad_VD, hidden_grad_BLD)
        ]
        return *scaled, None, None


def _log_softmax(logits_CV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return this device's columns of the logarithm of the distribution over all of them."""
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
