"""Offline tasks asked of a model while it trains, without a checkpoint in between.

    held-out windows, questions as windows ─► one pass to the largest depth ─► nats per window ─┐
    exam of a generated task ─► argmax behind each prompt ──────────────────────────────────────┤
    evals.jsonl, TensorBoard and W&B (`suite/TASK/METRIC/step_R`) ◄─────────────────────────────┘

It asks what `titan-loop eval --tasks … --limit … --depths …` asks of a checkpoint and finds the
same. Data-parallel ranks share the windows; FSDP, tensor and context parallelism stay as they are.
Nothing of training is touched: no random number is drawn and no state is left behind.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.logging import logger

from titan_loop.data.load.loader import HeldOutWindows, held_out_windows, named_sources
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError, nearest
from titan_loop.evaluation.bits_per_byte import bootstrap_bits_per_byte
from titan_loop.evaluation.evals_log import WHILE_TRAINING, append_evaluation
from titan_loop.evaluation.offline_tasks import HELD_OUT, OFFLINE_TASKS
from titan_loop.evaluation.suites import expand_tasks
from titan_loop.evaluation.task_report import ReadingResult, TaskReport, headline
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer
from titan_loop.training.held_out import window_nats
from titan_loop.training.suite_config import SuiteConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from titan_loop.training.trainer import LoopTrainer

_ROW_MULTIPLE = 16
"""Rows of a task are as long as its longest question, rounded up to this."""

Results = dict[str, list[dict[str, float]]]  # task → metrics of each depth


def check_suite(config: "LoopTrainer.Config") -> None:
    """Raise `UserError` for a suite that this run cannot be asked; touches no device.

    Args:
        config: Of the run, resolved.
    """
    suite = config.suite
    if suite.interval < 0:
        raise UserError(f"suite.interval={suite.interval} is negative; 0 turns it off")
    if not suite.enabled:
        return
    for name, value in (("windows", suite.windows), ("questions", suite.questions)):
        if value < 1:
            raise UserError(f"suite.{name}={value} must be at least 1")
    if not suite.depths or min(suite.depths) < 1:
        raise UserError(f"suite.depths={suite.depths} must name depths of at least 1")
    known = (HELD_OUT, *OFFLINE_TASKS)
    for name in _names(suite):
        if name not in known:
            raise UserError(
                f"suite.tasks: {name} cannot be asked while training{nearest(name, known)}"
            )
        task = config.dataloader.task()
        if task is not None and task.name == name:
            _check_exam(config, task)
        elif not config.dataloader.source_paths():
            raise UserError(
                f"suite.tasks: {name} needs a prepared source, for its text or its tokenizer, and "
                "this data has none; take it out of suite.tasks"
            )
        elif name != HELD_OUT:
            OFFLINE_TASKS[name]()  # says what is missing


def _check_exam(config: "LoopTrainer.Config", task: Task) -> None:
    if config.parallelism.context_parallel_degree > 1:
        raise UserError(
            f"suite.tasks: {task.name} in token ids does not work with "
            f"parallelism.context_parallel_degree={config.parallelism.context_parallel_degree}; "
            f"leave that at 1, or take {task.name} out"
        )
    task.exam(config.suite.questions)


def _names(suite: SuiteConfig) -> list[str]:
    return [task.name for task in expand_tasks(suite.tasks)]


class TrainingSuite:
    """A `Callback` that asks a suite every `interval` steps and after the last one; collective.

    Args:
        config: Which tasks, how often, how deep.
    """

    def __init__(self, config: SuiteConfig) -> None:
        self.config = config
        self._tasks: list[_Task] = []

    def on_train_start(self, trainer: "LoopTrainer") -> None:
        """Read windows and questions once."""
        generated, questions = trainer.config.dataloader.task(), self.config.questions
        for name in _names(self.config):
            if name == HELD_OUT:
                task = _HeldOut(trainer, self.config.windows)
            elif generated is not None and generated.name == name:
                task = _Exam(trainer, generated, questions)
            else:
                task = _Questions(trainer, name, questions)
            self._tasks.append(task)

    def on_step_end(self, trainer: "LoopTrainer", metrics: Mapping[str, Any]) -> None:
        """Ask if it is time; every rank takes part, rank 0 writes."""
        if trainer.step % self.config.interval and trainer.step != trainer.config.training.steps:
            return
        began = time.perf_counter()
        report = self.ask(trainer)
        if dist.get_rank() == 0:
            run = RunDirectory(trainer.config.dump_folder)
            seconds = time.perf_counter() - began
            append_evaluation(run, report, asked=WHILE_TRAINING, seconds=seconds)
            logger.info("suite, step %d: %s", trainer.step, _summary(report))
        trainer.metrics_processor.log_numbers(_curves(report), trainer.step)

    def on_train_end(self, trainer: "LoopTrainer") -> None:
        """Do nothing."""

    @torch.no_grad()
    def ask(self, trainer: "LoopTrainer") -> TaskReport:
        """Return what all tasks give at every depth, equal on all ranks; collective."""
        report = TaskReport(
            step=trainer.step,
            tokens=trainer.tokens,
            trained_recurrent_steps=trainer.model.recurrent_steps,
            manifest_sha256="",
        )
        trainer.model.eval()
        for task in self._tasks:
            for name, metrics in task.ask(trainer, self.config.depths).items():
                report.tasks[name] = {
                    f"static:{depth}": ReadingResult(metrics=values, mean_steps=float(depth))
                    for depth, values in zip(self.config.depths, metrics, strict=True)
                }
            trainer.stop_listener.progress()
        trainer.model.train()
        return report


class _Task(ABC):
    """One task with its questions read."""

    @abstractmethod
    def ask(self, trainer: "LoopTrainer", depths: list[int]) -> Results:
        """Return the metrics of each depth; collective."""


class _HeldOut(_Task):
    """Bits per byte of every source of the mixture."""

    def __init__(self, trainer: "LoopTrainer", count: int) -> None:
        self._windows = {
            name: held_out_windows(source, seq_len=trainer.config.training.seq_len, count=count)
            for name, source in named_sources(trainer.config.dataloader.source_paths()).items()
        }

    def ask(self, trainer: "LoopTrainer", depths: list[int]) -> Results:
        """Score the windows, with 95 % bootstrap intervals over them."""
        results: Results = {}
        for name, windows in self._windows.items():
            intervals = bootstrap_bits_per_byte(
                window_nats(trainer, windows, depths).cpu().numpy(),
                windows.label_bytes.sum(1).numpy(),
            )
            results[f"{HELD_OUT}/{name}"] = [
                {
                    "bits_per_byte": interval.value,
                    "bits_per_byte_low": interval.low,
                    "bits_per_byte_high": interval.high,
                }
                for interval in intervals
            ]
        return results


class _Questions(_Task):
    """Multiple-choice questions in text: every answer is a window whose labels are the answer's."""

    def __init__(self, trainer: "LoopTrainer", name: str, count: int) -> None:
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

    def ask(self, trainer: "LoopTrainer", depths: list[int]) -> Results:
        """Take the most likely answer, as the harness does."""
        nats_RQ = window_nats(trainer, self._windows, depths).tolist()
        return {self._name: [_multiple_choice(self._documents, nats_Q) for nats_Q in nats_RQ]}


class _Exam(_Task):
    """Held-out examples of the generated task that the run trains on, in token ids.

    The answer is one token and must be the most likely one of all.

    Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B.2 (graded at ℓ = L).
    """

    def __init__(self, trainer: "LoopTrainer", task: Task, count: int) -> None:
        self._name = task.name
        prompts, answers = task.exam(count)
        self._prompts = torch.from_numpy(prompts).to(trainer.device)
        self._answers = torch.from_numpy(answers).to(trainer.device)

    def ask(self, trainer: "LoopTrainer", depths: list[int]) -> Results:
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
        return {self._name: [{"acc,none": share} for share in right]}


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


def _whole(logits: Tensor) -> Tensor:
    """Gather the vocabulary under tensor parallelism."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _curves(report: TaskReport) -> dict[str, float]:
    """Return what TensorBoard and W&B draw: `suite/TASK/METRIC/step_R`, without intervals."""
    return {
        f"suite/{name}/{metric.removesuffix(',none')}/step_{reading.removeprefix('static:')}": value
        for name, readings in report.tasks.items()
        for reading, result in readings.items()
        for metric, value in result.metrics.items()
        if not metric.endswith(("_low", "_high"))
    }


def _summary(report: TaskReport) -> str:
    parts = []
    for name, readings in report.tasks.items():
        metric = headline(next(iter(readings.values())).metrics, "acc,none")
        values = " ".join(
            f"R={reading.removeprefix('static:')} {result.metrics[metric]:.3f}"
            for reading, result in readings.items()
        )
        parts.append(f"{name} {metric.removesuffix(',none')} {values}")
    return "; ".join(parts)
