"""Tasks asked of a model while it trains: held-out text, questions in text, its own exam.

Every task reads its windows once and is then asked at several depths, all from one pass. FSDP,
tensor and context parallelism stay as they are: data-parallel ranks share the windows, and every
rank runs the same number of passes, so that no collective is left waiting.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from titan_loop.data.load.held_out import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.held_out import (
    Sums,
    WindowScores,
    at_depths,
    open_sources,
    score_windows,
    summarise,
)
from titan_loop.evaluation.offline_tasks import HELD_OUT, OFFLINE_TASKS
from titan_loop.evaluation.task_report import ReadingResult
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer
from titan_loop.training.callback import TrainingState

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROW_MULTIPLE = 16
"""Rows of a task are as long as its longest question, rounded up to this."""

Results = dict[str, dict[str, ReadingResult]]  # task → reading → result


def score_in_training(
    trainer: TrainingState, windows: HeldOutWindows, depths: Sequence[int]
) -> WindowScores:
    """Score windows with the model that is being trained, in evaluation mode; collective.

    Data-parallel ranks share the windows, context-parallel ones each window.

    Args:
        trainer: Gives the model and the layout of the ranks.
        windows: W windows of L tokens, the same on every rank. L fits the tensor-parallel degree,
            and is the training window under context parallelism.
        depths: Recurrent steps, each ≥ 1.

    Returns:
        The scores of all windows, equal on all ranks.
    """
    whole = at_depths(trainer.model, depths, trainer.window_share)

    def forward(*columns: Tensor) -> tuple[Tensor, Tensor]:
        with trainer.train_context():
            return whole(*columns)

    return score_windows(
        windows,
        forward,
        device=trainer.device,
        batch_windows=trainer.config.training.local_batch_size,
        divide=partial(_divide, trainer),
    )


def _divide(
    trainer: TrainingState, rows: Sequence[int], work: Callable[[Sequence[int]], list[Sums]]
) -> list[Sums]:
    """Let a rank work on every dp-th row; all ranks get as many, some the last row once more."""
    degree, rank = 1, 0
    if trainer.parallel_dims.dp_enabled:
        mesh = trainer.parallel_dims.get_mesh("batch")
        degree, rank = mesh.size(), mesh.get_local_rank()
    mine = range(rank, -(-len(rows) // degree) * degree, degree)
    sums = torch.tensor(
        work([rows[min(index, len(rows) - 1)] for index in mine]),
        dtype=torch.float64,
        device=trainer.device,
    )
    totals = sums.new_zeros(len(rows), *sums.shape[1:])
    there = [index for index in mine if index < len(rows)]
    totals[there] = sums[: len(there)]
    loss_mesh = trainer.parallel_dims.get_optional_mesh("loss")
    if loss_mesh is not None:
        totals = dist_utils.dist_sum_tensor(totals, loss_mesh)
    return [(nats_P, steps_P) for nats_P, steps_P in totals.tolist()]


class TrainingTask(ABC):
    """One task with its windows or questions read."""

    @abstractmethod
    def ask(self, trainer: TrainingState, depths: Sequence[int]) -> Results:
        """Return what the task gives at each depth, equal on all ranks; collective."""


class HeldOutText(TrainingTask):
    """Bits per byte of every source.

    Args:
        trainer: Gives the window length.
        sources: Folders of prepared sources.
        count: Number of windows per source.
    """

    def __init__(self, trainer: TrainingState, sources: Sequence[str], count: int) -> None:
        seq_len = trainer.config.training.seq_len
        self._windows = open_sources(sources, seq_len=seq_len, count=count)

    def ask(self, trainer: TrainingState, depths: Sequence[int]) -> Results:
        """Score the windows."""
        names = [f"static:{depth}" for depth in depths]
        return {
            f"{HELD_OUT}/{name}": summarise(score_in_training(trainer, windows, depths), names)
            for name, windows in self._windows.items()
        }


class Questions(TrainingTask):
    """Multiple-choice questions in text: every answer is a window whose labels are the answer's.

    Args:
        trainer: Gives the window length and the tokenizer, that of its first source.
        name: One of `OFFLINE_TASKS`.
        count: Number of questions, the first ones.
    """

    def __init__(self, trainer: TrainingState, name: str, count: int) -> None:
        self._name = name
        self._documents = OFFLINE_TASKS[name]()[:count]
        source = Path(trainer.config.dataloader.source_paths()[0])
        tokenizer = load_tokenizer(source / TOKENIZER_NAME)
        room = trainer.config.training.seq_len
        pairs = [
            continuation_tokens(tokenizer, document["text"], f" {choice}")
            for document in self._documents
            for choice in document["choices"]
        ]
        cut = sum(len(context) + len(answer) > room + 1 for context, answer in pairs)
        if cut:
            logger.warning(
                "suite: %d of %d answers of %s are longer than the window of %d tokens with their "
                "question, which loses its beginning",
                cut,
                len(pairs),
                name,
                room,
            )
        longest = min(room, max(len(context) + len(answer) for context, answer in pairs) - 1)
        multiple = _ROW_MULTIPLE * trainer.parallel_dims.tp
        whole = trainer.window_share is not None  # context parallelism splits the training window
        length = room if whole else min(room, -(-longest // multiple) * multiple)
        self._windows = _as_windows(pairs, length)

    def ask(self, trainer: TrainingState, depths: Sequence[int]) -> Results:
        """Take the most likely answer, as the harness does."""
        nats_PQ = score_in_training(trainer, self._windows, depths).nats_PW.tolist()
        metrics = [_multiple_choice(self._documents, nats_Q) for nats_Q in nats_PQ]
        return {self._name: _at_depths(depths, metrics)}


class Exam(TrainingTask):
    """Held-out examples of the generated task that the run trains on, in token ids.

    The answer is one token and must be the most likely one of all.

    Args:
        trainer: Gives the device.
        task: The task.
        count: Number of held-out examples.

    Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B.2 (graded at ℓ = L).
    """

    def __init__(self, trainer: TrainingState, task: Task, count: int) -> None:
        self._name = task.name
        prompts, answers = task.exam(count)
        self._prompts = torch.from_numpy(prompts).to(trainer.device)
        self._answers = torch.from_numpy(answers).to(trainer.device)

    def ask(self, trainer: TrainingState, depths: Sequence[int]) -> Results:
        """Return exact match; every data-parallel rank asks all questions."""
        model, prompts = trainer.model, self._prompts
        positions = torch.arange(prompts.shape[1], device=prompts.device)
        positions = positions.expand(prompts.shape).contiguous()
        with trainer.train_context():
            output = model(prompts, positions, recurrent_steps=max(depths), collect="all")
            guesses = [
                _whole(model.lm_head(output.hidden_RBLD[depth - 1])).argmax(dim=-1)[:, -1]
                for depth in depths
            ]
        right = [float((guess == self._answers).float().mean()) for guess in guesses]
        return {self._name: _at_depths(depths, [{"acc,none": share} for share in right])}


def continuation_tokens(
    tokenizer: "Tokenizer", context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of both, cut where those of the context alone end, as the harness cuts.

    Args:
        tokenizer: Adds nothing to a text.
        context: Does not end in white space.
        continuation: Begins with a space.
    """
    whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    first = tokenizer.encode(context, add_special_tokens=False).ids
    return first, whole[len(first) :]


def _as_windows(pairs: Sequence[tuple[list[int], list[int]]], length: int) -> HeldOutWindows:
    """Return a window for each (context, continuation), padded on the right.

    A pair that is too long loses the beginning of its context.
    """
    inputs = torch.zeros((len(pairs), length), dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    for row, (context, continuation) in enumerate(pairs):
        tokens = [*context, *continuation][-(length + 1) :]
        inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        end = len(tokens) - 1
        labels[row, end - len(continuation) : end] = torch.tensor(continuation)
    positions = torch.arange(length).expand(inputs.shape).contiguous()
    return HeldOutWindows(inputs, positions, labels, torch.zeros_like(inputs))


def _multiple_choice(
    documents: Sequence[Mapping[str, Any]], nats_Q: Sequence[float]
) -> dict[str, float]:
    """Return the harness' acc and acc_norm, and the bits per byte of the right answers."""
    nats = iter(nats_Q)
    right = right_by_character = bits = 0.0
    for document in documents:
        choices, answer = document["choices"], document["answer"]
        each = [next(nats) for _ in choices]
        by_character = [value / len(choice) for value, choice in zip(each, choices, strict=True)]
        right += each.index(min(each)) == answer
        right_by_character += by_character.index(min(by_character)) == answer
        bits += each[answer] / (math.log(2) * len(choices[answer].encode()))
    return {
        "acc,none": right / len(documents),
        "acc_norm,none": right_by_character / len(documents),
        "answer_bits_per_byte": bits / len(documents),
    }


def _at_depths(
    depths: Sequence[int], metrics: Sequence[dict[str, float]]
) -> dict[str, ReadingResult]:
    return {
        f"static:{depth}": ReadingResult(metrics=values, mean_steps=float(depth))
        for depth, values in zip(depths, metrics, strict=True)
    }


def _whole(logits: Tensor) -> Tensor:
    """Gather the vocabulary under tensor parallelism."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
