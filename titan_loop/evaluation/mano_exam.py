"""Exact-match accuracy on Mano, the arithmetic task that needs depth, while a model trains.

Every question is held out and has the largest number of operations; the answer is one token, so one
forward pass to the largest depth grades all depths. Results go to `evals/mano.jsonl`: `step`,
`tokens` and `accuracy/step_r` for every depth r.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B.2 (graded at ℓ = L).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import logger

from titan_loop.data.synthetic.mano import ManoVocabulary, exam
from titan_loop.data.synthetic.mano_loader import ManoLoader
from titan_loop.errors import UserError
from titan_loop.json_files import append_jsonl
from titan_loop.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer


@dataclass(frozen=True, kw_only=True)
class ManoExam:
    """A `Callback` that grades the model every `interval` steps and after the last one.

    Attributes:
        depths: Recurrent steps to grade.
        interval: Steps between two exams.
        questions: How many, the same ones every time.
    """

    depths: tuple[int, ...]
    interval: int
    questions: int = 512

    def on_train_start(self, trainer: "LoopTrainer") -> None:
        """Refuse what the exam cannot be taken under."""
        if trainer.window_share is not None:
            raise UserError(
                "parallelism.context_parallel_degree > 1 does not work with ManoExam; leave it at 1"
            )

    def on_step_end(self, trainer: "LoopTrainer", metrics: Mapping[str, Any]) -> None:
        """Grade if it is time; every rank takes part, rank 0 writes."""
        if trainer.step % self.interval and trainer.step != trainer.config.training.steps:
            return
        accuracies = self.grade(trainer)
        if dist.get_rank() == 0:
            record = {"step": trainer.step, "tokens": trainer.tokens} | {
                f"accuracy/step_{depth}": accuracy
                for depth, accuracy in zip(self.depths, accuracies, strict=True)
            }
            append_jsonl(
                RunDirectory(trainer.config.dump_folder).evaluations / "mano.jsonl", record
            )
            shown = " ".join(f"R={d} {a:.1%}" for d, a in zip(self.depths, accuracies, strict=True))
            logger.info("Mano, step %d: %s", trainer.step, shown)

    def on_train_end(self, trainer: "LoopTrainer") -> None:
        """Do nothing."""

    @torch.no_grad()
    def grade(self, trainer: "LoopTrainer") -> list[float]:
        """Return the share of right answers at every depth."""
        task = trainer.config.dataloader
        assert isinstance(task, ManoLoader.Config), "ManoExam grades runs on Mano"
        vocabulary = ManoVocabulary(task.modulus, task.max_operations)
        prompts, answers = (
            torch.from_numpy(array).to(trainer.device) for array in exam(vocabulary, self.questions)
        )
        model = trainer.model
        model.eval()
        with trainer.train_context():
            output = model(
                prompts, _positions(prompts), recurrent_steps=max(self.depths), collect="all"
            )
            predicted = [
                _whole(model.lm_head(output.hidden_RBLD[depth - 1])).argmax(dim=-1)[:, -1]
                for depth in self.depths
            ]
        model.train()
        return [float((guess == answers).float().mean()) for guess in predicted]


def _positions(prompts: Tensor) -> Tensor:
    return torch.arange(prompts.shape[1], device=prompts.device).expand(prompts.shape).contiguous()


def _whole(logits: Tensor) -> Tensor:
    """Gather the vocabulary under tensor parallelism."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
