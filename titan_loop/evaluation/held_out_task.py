"""The task `held_out`: bits per byte of a run's own held-out text, per domain, at every reading.

Also the exam of a generated task, for runs that were trained on it: such a model has no tokenizer
to be asked in text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.data.load.loader import (
    HeldOutWindows,
    WindowLoader,
    held_out_windows,
    named_sources,
)
from titan_loop.data.tasks.task import Task
from titan_loop.errors import UserError
from titan_loop.evaluation.bits_per_byte import bootstrap_bits_per_byte
from titan_loop.evaluation.ranks import share_work
from titan_loop.evaluation.readings import Reading, frontier_readings, score_states
from titan_loop.evaluation.suites import NotAskedError
from titan_loop.evaluation.task_report import ReadingResult
from titan_loop.evaluation.token_scorer import TokenRequest, TokenScorer
from titan_loop.models.decoder import LoopDecoder

_BATCH_WINDOWS = 8
_SAMPLE_WINDOWS = 4
_SAMPLE_QUESTIONS = 64


def load_windows(config: Mapping[str, Any], count: int) -> dict[str, HeldOutWindows]:
    """Return the held-out windows of every source of a run.

    Args:
        config: The run's `config.json`.
        count: Windows a source, the same ones every time.

    Raises:
        NotAskedError: The run has no prepared sources.
        UserError: They are gone.
    """
    mixture = config["dataloader"].get("mixture")
    if not mixture:
        raise NotAskedError(
            "held_out: the run was imported or trained on generated data, it has no held-out text"
        )
    sources = named_sources(WindowLoader.Config(mixture=mixture).source_paths())
    seq_len = config["training"]["seq_len"]
    return {
        name: held_out_windows(source, seq_len=seq_len, count=count)
        for name, source in sources.items()
    }


def score_held_out(
    model: LoopDecoder, windows: HeldOutWindows, readings: Sequence[Reading]
) -> dict[str, ReadingResult]:
    """Return bits per byte with its 95 % bootstrap interval over windows; collective.

    Args:
        model: Whole, on every rank.
        windows: Of one source.
        readings: All are scored in one pass.

    Raises:
        UserError: The model's context is shorter than a window.
    """
    _require_context(model, "held_out", windows.input.shape[1])

    def work(share: Sequence[int]) -> list[tuple[list[float], list[int], int]]:
        return [
            row
            for start in range(0, len(share), _BATCH_WINDOWS)
            for row in _score_windows(
                model, windows, share[start : start + _BATCH_WINDOWS], readings
            )
        ]

    rows = share_work(range(len(windows.labels)), work)
    nats_PW = torch.tensor([row[0] for row in rows], dtype=torch.float64).T
    steps_P = torch.tensor([row[1] for row in rows]).sum(0).tolist()
    tokens = sum(row[2] for row in rows)
    intervals = bootstrap_bits_per_byte(nats_PW.numpy(), windows.label_bytes.sum(1).numpy())
    return {
        reading.name: ReadingResult(
            metrics={
                "bits_per_byte": interval.value,
                "bits_per_byte_low": interval.low,
                "bits_per_byte_high": interval.high,
            },
            mean_steps=steps / tokens,
        )
        for reading, interval, steps in zip(readings, intervals, steps_P, strict=True)
    }


def held_out_frontier_readings(
    model: LoopDecoder, windows: HeldOutWindows, recurrent_steps: int
) -> list[Reading]:
    """Return the frontier's readings, their thresholds taken from the first few windows.

    Raises:
        UserError: The model's context is shorter than a window.
    """
    _require_context(model, "held_out", windows.input.shape[1])
    rows = range(min(_SAMPLE_WINDOWS, len(windows.labels)))
    states, _ = _states(model, windows, rows, recurrent_steps)
    return frontier_readings(model, states, recurrent_steps)


@torch.no_grad()
def exam_frontier_readings(model: LoopDecoder, task: Task, recurrent_steps: int) -> list[Reading]:
    """Return the frontier's readings, their thresholds taken from questions of the exam.

    Raises:
        UserError: The model's context is shorter than a question.
    """
    prompts = torch.from_numpy(task.exam(_SAMPLE_QUESTIONS)[0])
    _require_context(model, task.name, prompts.shape[1])
    device = model.tok_embeddings.weight.device
    output = model(prompts.to(device), recurrent_steps=recurrent_steps, collect="all")
    states = [hidden_BLD[:, -1] for hidden_BLD in output.hidden_RBLD]
    return frontier_readings(model, states, recurrent_steps)


def score_exam(
    model: LoopDecoder, task: Task, readings: Sequence[Reading], questions: int
) -> dict[str, ReadingResult]:
    """Return exact match on the exam of the task a run was trained on; collective.

    Args:
        model: Whole, on every rank.
        task: The task.
        readings: All are scored in one pass.
        questions: Number of held-out examples.

    Raises:
        UserError: The model's context is shorter than a question.
    """
    prompts, answers = task.exam(questions)
    _require_context(model, task.name, prompts.shape[1])
    requests = [
        TokenRequest(tuple(prompt), (answer,))
        for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)
    ]
    scores = TokenScorer(model, readings).score(requests)
    return {
        reading.name: ReadingResult(
            metrics={"acc,none": sum(score.greedy[index] for score in scores) / len(scores)},
            mean_steps=sum(score.steps[index] for score in scores) / len(scores),
        )
        for index, reading in enumerate(readings)
    }


def _require_context(model: LoopDecoder, task: str, tokens: int) -> None:
    context = model.config.max_seq_len
    if context < tokens:
        raise UserError(
            f"max_length={context} is shorter than the {tokens} tokens of a window of {task}; "
            "raise it, or leave it out"
        )


def _score_windows(
    model: LoopDecoder, windows: HeldOutWindows, rows: Sequence[int], readings: Sequence[Reading]
) -> list[tuple[list[float], list[int], int]]:
    """Return of each window: summed nats and steps a reading, and its number of labels."""
    deepest = max(reading.deepest_step for reading in readings)
    states, valid_BL = _states(model, windows, rows, deepest)
    labels_T = windows.labels[list(rows)][valid_BL]
    scores = score_states(model, states, labels_T.to(states[0].device), readings)
    lengths = valid_BL.sum(1).tolist()
    return [
        (nats.double().sum(1).tolist(), steps.sum(1).tolist(), length)
        for nats, steps, length in zip(
            scores.nats_PT.cpu().split(lengths, 1),
            scores.step_PT.cpu().split(lengths, 1),
            lengths,
            strict=True,
        )
    ]


@torch.no_grad()
def _states(
    model: LoopDecoder, windows: HeldOutWindows, rows: Sequence[int], steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the states of all positions with a label, (T, D) a step, and which these are."""
    device, chosen = model.tok_embeddings.weight.device, list(rows)
    valid_BL = windows.labels[chosen] != IGNORE_INDEX
    output = model(
        windows.input[chosen].to(device),
        windows.positions[chosen].to(device),
        recurrent_steps=steps,
        collect="all",
    )
    return [hidden_BLD[valid_BL.to(device)] for hidden_BLD in output.hidden_RBLD], valid_BL
