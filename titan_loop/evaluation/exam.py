"""The exam of a generated task: held-out examples, right or wrong, counted by stratum.

    task.exam ─► windows of each stratum ─► one pass ─► right labels at every reading ─► accuracy

An example is right if every label of its answer is the most likely of all tokens, so that greedy
decoding would have produced it. A model in training, which ranks may share, and a
checkpoint are asked the same windows.

An exam of facts (`Task.knowledge`) also measures the bits that the model knows: the loss of a
uniform guess minus the model's loss on the answers.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from titan_loop.data.columns import Column
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.load.task_loader import clear, place
from titan_loop.data.load.windows import empty_batch
from titan_loop.data.tasks.task import Example, Knowledge, Task
from titan_loop.errors import UserError
from titan_loop.evaluation.task_report import ReadingResult, Results, graded
from titan_loop.evaluation.window_scores import Totals
from titan_loop.models.decoder import LoopDecoder

logger = logging.getLogger(__name__)

ACCURACY = "acc,none"
LABELS = "labels_acc,none"
"""Share of single labels that are right, where an example has several."""

KNOWLEDGE = "knowledge"
"""The result TASK/knowledge of an exam of facts covers all of its strata together."""

OWN_DEPTH = "depth"
"""Name of the reading that takes every question after as many recurrent steps as it needs."""


class Exam:
    """Held-out examples of a task as windows, and their grading.

    Args:
        count: Largest number of examples of a stratum.
        room: Longest window in tokens.
        multiple: Unit, in tokens, to which the length of windows is rounded up.
        leave_out: Whether to skip strata that do not fit into the room, with a warning; the first
            stratum must fit.

    Attributes:
        windows: Windows by the name of the result: TASK, or TASK/STRATUM where there are several.
        steps: Recurrent steps that each window's question needs, by the same name; 0 if unknown.

    Source: grading one answer token, at the largest number of operations (Mano): Zhu et al. 2025
        (Ouro), arXiv 2510.25741, §6 and Appendix B.2.
    """

    def __init__(
        self,
        task: Task,
        count: int,
        *,
        vocab_size: int,
        room: int,
        multiple: int = 1,
        strata: Sequence[str] | None = None,
        leave_out: bool = False,
    ) -> None:
        if task.vocab_size > vocab_size:
            raise UserError(
                f"task {task.name} has {task.vocab_size} tokens, the model's vocabulary has "
                f"{vocab_size}: ask it of a model that was trained on it"
            )
        alone = len(task.strata) == 1
        self._task = task
        self.windows: dict[str, HeldOutWindows] = {}
        self.steps: dict[str, list[int]] = {}
        exams = {
            task.name if alone else f"{task.name}/{stratum}": examples
            for stratum, examples in task.exam(count, strata=strata).items()
        }
        if not leave_out:  # refuse at once if the longest of all does not fit
            longest = max(exams, key=lambda name: _positions(exams[name]))
            _require_room(longest, _positions(exams[longest]), room)
        for name, examples in exams.items():
            try:
                self.windows[name] = example_windows(
                    name, examples, task.columns, room=room, multiple=multiple
                )
                self.steps[name] = [example.steps for example in examples]
            except UserError as error:
                if not leave_out or not self.windows:
                    raise
                logger.warning("not asked while training: %s", error)

    def grade(
        self,
        readings: Sequence[str],
        sums: Callable[[HeldOutWindows], Totals],
        nats: Callable[[HeldOutWindows], Totals] | None = None,
        sizes: tuple[int, int] = (0, 0),
    ) -> Results:
        """Return name → reading → accuracy and mean steps.

        If the number of steps that each question needs is known, and all those depths are among the
        readings, the reading `OWN_DEPTH` takes every question after its own number of steps.

        Args:
            sums: Counts right labels; collective where the ranks share the model or the windows.
            nats: Sums the labels' negative log likelihood, likewise; None skips the knowledge.
            sizes: As `model_sizes` returns them.
        """
        results: Results = {}
        for name, windows in self.windows.items():
            by_reading = dict(zip(readings, zip(*sums(windows), strict=True), strict=True))
            needed = [f"static:{steps}" for steps in self.steps[name]]
            if {*needed} <= by_reading.keys():
                own = [np.stack(by_reading[reading])[:, w] for w, reading in enumerate(needed)]
                right_W, steps_W = np.stack(own, axis=1)
                by_reading[OWN_DEPTH] = right_W, steps_W
            labels_W = (windows.labels != IGNORED).sum(dim=1).numpy()
            results[name] = {
                reading: _graded(right_W, steps_W, labels_W)
                for reading, (right_W, steps_W) in by_reading.items()
            }
        knowledge = self._task.knowledge
        if nats is not None and knowledge is not None:
            parts = {stratum: f"{self._task.name}/{stratum}" for stratum in knowledge.bits}
            if {*parts.values()} <= self.windows.keys():
                nats_PW = {stratum: nats(self.windows[name])[0] for stratum, name in parts.items()}
                known = _known(knowledge, nats_PW, readings, sizes)
                results[f"{self._task.name}/{KNOWLEDGE}"] = known
        return results


def _graded(
    right_W: NDArray[np.float64], steps_W: NDArray[np.float64], labels_W: NDArray[np.int64]
) -> ReadingResult:
    metrics = graded(ACCURACY, float((right_W == labels_W).mean()), len(labels_W))
    if labels_W.max() > 1:
        metrics[LABELS] = float(right_W.sum() / labels_W.sum())
    return ReadingResult(metrics=metrics, mean_steps=float(steps_W.sum() / labels_W.sum()))


def _known(
    knowledge: Knowledge,
    nats_PW: Mapping[str, NDArray[np.float64]],
    readings: Sequence[str],
    sizes: tuple[int, int],
) -> dict[str, ReadingResult]:
    by_stratum = {
        f"{stratum}_bits": bits - np.asarray(nats_PW[stratum]).mean(axis=1) / math.log(2)
        for stratum, bits in knowledge.bits.items()
    }
    bits_P = sum(by_stratum.values(), np.zeros(len(readings)))
    every, inner = sizes
    known = {
        "bits": bits_P,
        **by_stratum,
        "bits_per_parameter": knowledge.items * bits_P / every,
        "bits_per_inner_parameter": knowledge.items * bits_P / inner,
    }
    return {
        reading: ReadingResult(metrics={name: float(bits_P[row]) for name, bits_P in known.items()})
        for row, reading in enumerate(readings)
    }


def model_sizes(model: LoopDecoder) -> tuple[int, int]:
    """Return the number of parameters, with and without embedding and head."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = ("tok_embeddings.", "lm_head.")
    inner = sum(size for name, size in sizes.items() if not name.startswith(tables))
    return sum(sizes.values()), inner


def _positions(examples: Sequence[Example]) -> int:
    return max(int(np.flatnonzero(e.answer_labels() != IGNORED)[-1]) + 1 for e in examples)


def _require_room(name: str, positions: int, room: int) -> None:
    if positions > room:
        raise UserError(
            f"{name}: an exam of {positions} positions does not fit into a window of {room}: "
            "lengthen the window (training.seq_len, eval --max-length) or choose shorter questions "
            "(analyse --strata)"
        )


def question_windows(
    model: LoopDecoder, task: Task, stratum: str, questions: Sequence[Any]
) -> HeldOutWindows:
    """Return a window for each question, as the exam has them."""
    examples = [task.encode(question) for question in questions]
    return example_windows(stratum, examples, task.columns, room=model.config.max_seq_len)


def example_windows(
    name: str,
    examples: Sequence[Example],
    declared: Sequence[Column],
    *,
    room: int,
    multiple: int = 1,
) -> HeldOutWindows:
    """Return a window for each example of a stratum, with room and multiple as in `Exam`.

    Padding follows an example's last label; every padding token is a document of its own.
    """
    answers = [example.answer_labels() for example in examples]
    longest = _positions(examples)
    _require_room(name, longest, room)
    length = min(room, -(-longest // multiple) * multiple)
    wanted = [column for column in declared if column.reader != "loss"]
    (inputs, labels), rows = empty_batch(len(examples), length, wanted)
    for example, answer, window in zip(examples, answers, rows, strict=True):
        clear(window)
        place(window, example, answer, wanted)
    return HeldOutWindows(
        inputs.pop("input"),
        inputs.pop("positions"),
        labels,
        torch.zeros_like(labels),
        inputs,
        [column.name for column in wanted if not column.per_token],
    )
