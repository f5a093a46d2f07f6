"""Distillation: the loop learns the distribution of a teacher, streamed like the cross entropy.

    L = 1/N Σ_i [ (1 − α) CE_i + α KL_i ],   KL_i = Σ_v q_iv (log q_iv − log p_iv)
    q = softmax(W_t t_i),   p = softmax(W h_i)

| symbol | code |
|---|---|
| h, W | the last step's state and the head |
| t, W_t | the teacher's state and head |
| α | `share` |
| N | valid tokens of the global batch |

The teacher is a frozen model from a run, at its own R, or the model itself at R = 1, whose state is
then a constant. `titan_loop/objectives/streamed_distillation.py` streams the loss.

Source: Bae et al. 2024, arXiv 2410.20672, §2.5 (for tied layers).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torchtitan.config import CompileConfig
from torchtitan.config.configs import ParallelismConfig

from titan_loop.checkpoint import model as saved_model
from titan_loop.errors import Refusal, UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.family import decoder_config
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.models.vocabulary import Vocabulary
from titan_loop.objectives.streamed_distillation import Targets, distilled_loss
from titan_loop.objectives.streamed_loss import LossBatch, StreamedLoss
from titan_loop.runs.saved_run import SavedRun


class DistillationLoss(StreamedLoss):
    """Cross entropy of the last step, and its KL divergence from a teacher's distribution."""

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """The teacher and its weight."""

        reads_tokens: ClassVar[bool] = True

        teacher: str = ""
        """A run or checkpoint with the same vocabulary, used at its own R; empty for the model
        itself at R = 1."""

        share: Annotated[float, Ge(0), Le(1)] = 1.0
        """α, the weight of the KL divergence from the teacher; the cross entropy has 1 − α."""

        def collect(self, *, exit_gate: bool) -> Collect:
            """Return the last step, or all where the first one is the teacher."""
            return "last" if self.teacher else "all"

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """Refuse a gate, and a teacher that cannot be opened."""
            yield from StreamedLoss.Config.refusals(
                self, trainable=trainable, exit_gate=exit_gate, fewest_steps=fewest_steps
            )
            if exit_gate:
                problem = "has no effect on an exit gate: the last step alone is distilled"
                yield Refusal.of("loss", "DistillationLoss", problem, "set model.exit_gate=False")
            if self.teacher:
                try:
                    SavedRun.open(self.teacher).checkpoint()
                except UserError as error:
                    yield Refusal("loss.teacher", f"loss.teacher={self.teacher}: {error}")

        def model_refusals(self, model: LoopDecoder.Config) -> Iterator[Refusal]:
            """Refuse a teacher of another vocabulary, or whose logits are shaped otherwise."""
            teacher = self._teacher()
            if teacher is not None and teacher.vocab_size != model.vocab_size:
                yield Refusal.of(
                    "loss.teacher",
                    self.teacher,
                    f"has a vocabulary of {teacher.vocab_size}, the model one of "
                    f"{model.vocab_size}",
                    "choose a teacher with the model's tokenizer",
                )
            heads = [each.lm_head for each in (teacher or model, model)]
            shapes = [
                (head.scale, head.softcap) for head in heads if isinstance(head, LMHead.Config)
            ]
            if len({*shapes}) > 1:
                problem = f"scales and caps logits by {shapes[0]}, the model by {shapes[1]}"
                yield Refusal.of("loss.teacher", self.teacher, problem, "choose a teacher alike")

        def _teacher(self) -> LoopDecoder.Config | None:
            """Return the architecture of a teacher that can be opened."""
            if not self.teacher:
                return None
            with suppress(UserError):  # `refusals` reports it
                return decoder_config(SavedRun.open(self.teacher).model_options, max_seq_len=1)
            return None

        def parallelism_refusals(self, parallelism: ParallelismConfig) -> Iterator[Refusal]:
            """Refuse context parallelism with a separate teacher, which reads whole windows."""
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
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        last_BLD = output.hidden_RBLD[-1]
        teacher_VD = None
        if self._place:
            teacher_BLD, teacher_VD = self._taught(batch, last_BLD, readout.vocabulary)
        else:
            teacher_BLD = output.hidden_RBLD[0]
        targets = Targets(batch.labels_BL, self.share, batch.valid_tokens, teacher_VD)
        loss, ce_SBL, kl_SBL = distilled_loss(readout, (last_BLD,), teacher_BLD, targets)
        last_step = output.first_step + len(output.hidden_RBLD) - 1
        return loss, {
            f"ce/step_{last_step}": ce_SBL.sum() / batch.valid_tokens,
            "distillation/kl": kl_SBL.sum() / batch.valid_tokens,
        }

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
