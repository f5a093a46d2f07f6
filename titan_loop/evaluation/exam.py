"""The exam of a generated task: held-out examples, right or wrong, counted by stratum.

    task.exam ─► windows of each stratum ─► one pass ─► right labels at every reading ─► accuracy

An example is right if every label of its answer is the most likely of all tokens, so greedy
decoding would have produced a right answer of several tokens. The same windows are asked of a model
in training (`right_at_depths`), where ranks may share it, and of a checkpoint
(`right_at_readings`). An exam of facts also says how many bits of them the model knows
(`Task.knowledge`): the information of a uniform guess less the loss on the answers, for all items
that training tells of, per parameter.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_loop.data.columns import Column
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.load.task_loader import clear, place
from titan_loop.data.load.windows import empty_batch
from titan_loop.data.tasks.task import Example, Knowledge, Task
from titan_loop.errors import UserError
from titan_loop.evaluation.readings import Reading
from titan_loop.evaluation.task_report import ReadingResult, Results, graded
from titan_loop.evaluation.window_scores import Forward, at_readings, depth_states
from titan_loop.models.context import WindowShare
from titan_loop.models.decoder import LoopDecoder

logger = logging.getLogger(__name__)

ACCURACY = "acc,none"
LABELS = "labels_acc,none"
"""Share of single labels that are right, where an example has several."""

KNOWLEDGE = "knowledge"
"""Result, behind the task's name, of all strata of an exam of facts together."""

OWN_DEPTH = "depth"
"""Reading of every question after as many recurrent steps as it needs."""

Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Right labels and recurrent steps of P readings and W windows, summed over a window's labels."""


class Exam:
    """Held-out examples of a task as windows, and how they are graded.

    Args:
        count: Largest number of examples of a stratum.
        room: Longest window in tokens.
        multiple: Windows are as long as the longest example, rounded up to this.
        strata: Strata to ask; None for all.
        leave_out: Whether strata that do not fit into the room are left out, with a warning; the
            first one never is.

    Attributes:
        windows: Windows by the name of the result: TASK, or TASK/STRATUM where there are several.
        steps: Recurrent steps that each window's question needs, by the same name; 0 for unknown.

    Raises:
        UserError: The model's vocabulary or window is too small, or the task has too few examples.

    Source: grading one answer token at ℓ = L: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and
        Appendix B.2.
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
        if not leave_out:  # say at once what the longest of all needs
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
        sums: Callable[[HeldOutWindows], Sums],
        nats: Callable[[HeldOutWindows], Sums] | None = None,
        sizes: tuple[int, int] = (0, 0),
    ) -> Results:
        """Return name → reading → accuracy and mean steps.

        Where questions say how many steps they need, and all those depths are among the readings,
        the reading `OWN_DEPTH` has every question after as many steps as it needs.

        Args:
            readings: Name of each row of the sums.
            sums: Counts right labels; collective where the ranks share the model or the windows.
            nats: Negative log likelihood of the labels, likewise; None measures no knowledge.
            sizes: Parameters of the model, with and without embedding and head.
        """
        results: Results = {}
        for name, windows in self.windows.items():
            sums_of = dict(zip(readings, zip(*sums(windows), strict=True), strict=True))
            sums_of |= self._at_own_depth(name, sums_of)
            right_PW, steps_PW = (np.stack(rows) for rows in zip(*sums_of.values(), strict=True))
            labels_W = (windows.labels != IGNORED).sum(dim=1).numpy()
            accuracy_P = (right_PW == labels_W).mean(axis=1)
            mean_steps_P = steps_PW.sum(axis=1) / labels_W.sum()
            questions = len(labels_W)
            results[name] = {
                reading: ReadingResult(
                    metrics=graded(ACCURACY, float(share), questions),
                    mean_steps=float(steps),
                )
                for reading, share, steps in zip(sums_of, accuracy_P, mean_steps_P, strict=True)
            }
            if labels_W.max() > 1:
                shares_P = right_PW.sum(axis=1) / labels_W.sum()
                for reading, share in zip(sums_of, shares_P, strict=True):
                    results[name][reading].metrics[LABELS] = float(share)
        knowledge = self._task.knowledge
        asked = (
            [] if knowledge is None else [f"{self._task.name}/{name}" for name in knowledge.bits]
        )
        if nats is not None and knowledge is not None and {*asked} <= self.windows.keys():
            results.update(self._known(knowledge, readings, nats, sizes))
        return results

    def _known(
        self,
        knowledge: Knowledge,
        readings: Sequence[str],
        nats: Callable[[HeldOutWindows], Sums],
        sizes: tuple[int, int],
    ) -> Results:
        """Return the bits an item that are known, by stratum and in all, and those a parameter."""
        by_stratum: dict[str, NDArray[np.float64]] = {}
        for stratum, bits in knowledge.bits.items():
            nats_PW, _ = nats(self.windows[f"{self._task.name}/{stratum}"])
            by_stratum[f"{stratum}_bits"] = bits - np.asarray(nats_PW).mean(axis=1) / math.log(2)
        bits_P = sum(by_stratum.values(), np.zeros(len(readings)))
        every, inner = sizes
        known = {
            "bits": bits_P,
            **by_stratum,
            "bits_per_parameter": knowledge.items * bits_P / every,
            "bits_per_inner_parameter": knowledge.items * bits_P / inner,
        }
        return {
            f"{self._task.name}/{KNOWLEDGE}": {
                reading: ReadingResult(
                    metrics={name: float(value_P[row]) for name, value_P in known.items()}
                )
                for row, reading in enumerate(readings)
            }
        }

    def _at_own_depth(self, name: str, sums_of: Mapping[str, Sums]) -> dict[str, Sums]:
        needed = [f"static:{steps}" for steps in self.steps[name]]
        if not {*needed} <= sums_of.keys():
            return {}
        own = zip(*(_window(sums_of[reading], w) for w, reading in enumerate(needed)), strict=True)
        right_W, steps_W = map(np.array, own)
        return {OWN_DEPTH: (right_W, steps_W)}


def _window(sums: Sums, window: int) -> tuple[float, float]:
    right_W, steps_W = sums
    return right_W[window], steps_W[window]


def right_at_depths(
    model: LoopDecoder, depths: Sequence[int], share: WindowShare | None = None
) -> Forward:
    """Count right labels at several depths of one pass; see `window_scores.at_depths`."""

    @torch.no_grad()
    def forward(windows: HeldOutWindows) -> tuple[Tensor, Tensor]:
        states, labels_BL = depth_states(model, depths, share, windows)
        right = []
        for state_BLD in states:
            logits_BLV = model.lm_head(state_BLD)
            if isinstance(logits_BLV, DTensor):  # the vocabulary is shared
                logits_BLV = logits_BLV.full_tensor()
            right.append((logits_BLV.argmax(dim=-1) == labels_BL).sum(dim=1))
        tokens_B = (labels_BL != IGNORED).sum(dim=1)
        steps_PB = torch.stack([depth * tokens_B for depth in depths])
        return torch.stack(right), steps_PB

    return forward


def model_sizes(model: LoopDecoder) -> tuple[int, int]:
    """Return the number of parameters, with and without embedding and head."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = ("tok_embeddings.", "lm_head.")
    inner = sum(size for name, size in sizes.items() if not name.startswith(tables))
    return sum(sizes.values()), inner


def right_at_readings(model: LoopDecoder, readings: Sequence[Reading]) -> Forward:
    """Count right labels under every reading of one pass; the model is whole on this rank."""
    return at_readings(model, readings, value=lambda scores: scores.right_PT)


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
    """Return a window a question, as the exam has them; see `example_windows`."""
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
    """Return a window an example; behind its last label it is padding, each a document.

    Args:
        name: Name of the stratum, for errors.
        room: Longest window in tokens.
        multiple: Windows are as long as the longest example, rounded up to this.

    Raises:
        UserError: An example does not fit into the room.
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
