"""The objective of the prefill student, and its initial weights; `student.py` has the symbols.

L = 1/N Σ_i [ |s_i − h_i|² / E + KL(head(coda(h_i)) || head(coda(s_i))) ]
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from titan_loop.errors import Refusal
from titan_loop.families.xllm.decoder import XllmDecoder
from titan_loop.families.xllm.student import ERROR, TAUGHT, start_from_teacher
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.output import Collect, LoopOutput
from titan_loop.models.readout import LMHead
from titan_loop.objectives.streamed_distillation import Targets, distilled_loss
from titan_loop.objectives.streamed_loss import LossBatch, StreamedLoss, token_mean
from titan_loop.training.callback import Callback, TrainingState


class StudentLoss(StreamedLoss):
    """The student's squared error in the state, plus its KL in the next token's distribution."""

    @dataclass(kw_only=True, slots=True)
    class Config(StreamedLoss.Config):
        """Has no options of its own."""

        def collect(self, *, exit_gate: bool) -> Collect:
            """Ask for the last state only."""
            return "last"

        def model_refusals(self, model: LoopDecoder.Config) -> Iterator[Refusal]:
            """Refuse a model without a student."""
            if ERROR not in model.aux:
                problem = f"trains a student, and this model.family={model.family} has none"
                yield Refusal.of("loss", "StudentLoss", problem, "set model.student of xllm")

        def refusals(
            self, *, trainable: Trainable, exit_gate: bool, fewest_steps: int
        ) -> Iterator[Refusal]:
            """Refuse an exit gate, which the student has no use for."""
            yield from StreamedLoss.Config.refusals(
                self, trainable=trainable, exit_gate=exit_gate, fewest_steps=fewest_steps
            )
            if exit_gate:
                problem = "has no effect on an exit gate"
                yield Refusal.of("loss", "StudentLoss", problem, "set model.exit_gate=False")

    def compute(
        self, readout: LMHead, output: LoopOutput, batch: LossBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one micro-batch; arguments as in `StreamedLoss`."""
        targets = Targets(batch.labels_BL, 1.0, batch.valid_tokens)
        predicted_BLD = output.hidden_RBLD[-1]
        loss, ce_SBL, kl_SBL = distilled_loss(
            readout, (predicted_BLD,), output.aux[TAUGHT], targets
        )
        error = token_mean(output.aux[ERROR], batch.labels_BL, batch.valid_tokens)
        return loss + error, {
            f"ce/step_{output.first_step}": ce_SBL.sum() / batch.valid_tokens,
            "student/error": error.detach(),
            "student/kl": kl_SBL.sum() / batch.valid_tokens,
        }


class TeacherStart(Callback):
    """Starts a new student from the weights of the core and of the injection."""

    def on_train_start(self, trainer: TrainingState) -> None:
        """Copy the weights at step 0; a resumed run keeps its student."""
        model = trainer.model
        if trainer.step == 0:
            assert isinstance(model, XllmDecoder)
            assert model.student is not None
            assert model.injection is not None
            start_from_teacher(model.student, model.looped_layers(), model.injection)
