"""Answers to a task's exam, written by the engine with exits: `analyse answers`.

    exam ─► engine, greedy, and k times at temperature 1 ─► right? steps? ─► shares, pass@k, FLOPs

An answer is right where the task's verifier gives it 1. Variances are over questions, for intervals
of arms that are asked the same ones.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

from titan_loop.analysis.results import total_flops
from titan_loop.analysis.steps.findings import Findings, open_task
from titan_loop.data.tasks.task import Task
from titan_loop.errors import require_at_least
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import parse_exit_policy
from titan_loop.inference.loading import Loaded, load_checkpoint
from titan_loop.inference.rows import Completion, Request
from titan_loop.inference.sampling import Sampling
from titan_loop.models.decoder_costs import DecoderCosts
from titan_loop.storage.json_files import number, read_jsonl

EXITS = ("full", "sampled", "q:0.5")
_ROWS = 256


def answers(
    run: Path,
    *,
    exits: tuple[str, ...] = EXITS,
    questions: int = 500,
    samples: int = 8,
    seed: int = 0,
) -> Findings:
    """Ask the hardest questions of a task's exam, and sum the FLOPs of the run's own answers.

    Args:
        run: Run on a generated task, or its checkpoints/step-N.
        exits: Exit policies to answer with.
        questions: Number of held-out questions.
        samples: Answers to each at temperature 1.
        seed: Seed of these answers.
    """
    require_at_least(1, samples=samples)
    trained, task, strata = open_task(run, (), questions, use="generate")
    # A window of rewards has no place for the last token, which is never read.
    room = max(trained.run.seq_len, task.longest_example)
    loaded = load_checkpoint(run, use="generate", context_tokens=room)
    asked = task.held_out_questions(questions, task.strata[strata[-1]])
    results: dict[str, float] = {}
    rows = [["exits", "greedy %", "sampled %", f"pass@{samples} %", "steps"]]
    for exit_text in exits:
        found = _measured(loaded, task, asked, exit_text, samples, seed)
        results |= {f"{task.name}/{name}/{exit_text}": value for name, value in found.items()}
        shares = [f"{100 * found[name]:.1f}" for name in ("greedy", "sampled", "any_right")]
        rows.append([exit_text, *shares, f"{found['steps']:.2f}"])
    written = loaded.run.directory.path / "rollouts.jsonl"
    if written.exists():
        lines = read_jsonl(written)
        results[f"{task.name}/rollout_flops/training"] = rollout_flops(loaded, lines)
        spent = total_flops(loaded.run.directory.read_metrics())
        results[f"{task.name}/update_flops/training"] = number(spent)
    record = {"questions": questions, "samples": samples, "seed": seed}
    tables = {f"{strata[-1]}, {questions} questions": rows}
    return Findings(name="answers", loaded=loaded, record=record, tables=tables, results=results)


def _measured(
    loaded: Loaded, task: Task, asked: Sequence[Any], exit_text: str, samples: int, seed: int
) -> dict[str, float]:
    """Return shares of right answers with their variances, and mean steps of a token."""
    engine = Engine(
        loaded.model,
        recurrent_steps=loaded.recurrent_steps,
        exit_policy=parse_exit_policy(exit_text),
    )

    def written(sampling: Sampling, times: int) -> tuple[list[list[float]], list[Completion]]:
        requests = [
            _request(task, question, seed + index * times + number)
            for index, question in enumerate(asked)
            for number in range(times)
        ]
        found = engine.complete(requests, rows=_ROWS, sampling=sampling)
        grades = [
            task.grade(asked[place // times], completion.tokens)
            for place, completion in enumerate(found)
        ]
        return [grades[first : first + times] for first in range(0, len(grades), times)], found

    greedy, completions = written(Sampling(), 1)
    sampled, others = written(Sampling(temperature=1.0), samples)
    measures = {
        "greedy": [one for (one,) in greedy],
        "sampled": [fmean(each) for each in sampled],
        "any_right": [max(each) for each in sampled],
    }
    found = {name: fmean(values) for name, values in measures.items()}
    if len(asked) > 1:
        found |= {f"{n}_variance": variance(v) / len(v) for n, v in measures.items()}
    for name, group in (("steps", completions), ("sampled_steps", others)):
        found[name] = fmean(step for completion in group for step in completion.steps)
    return found


def _request(task: Task, question: Any, seed: int) -> Request:
    example = task.encode(question)
    begin = int(example.answer.argmax())
    return Request(
        prompt=example.tokens[: begin + 1].tolist(),
        max_new_tokens=task.answer_limit or int(example.answer.sum()),
        stop_tokens=frozenset() if task.end is None else frozenset({task.end}),
        seed=seed,
    )


def rollout_flops(loaded: Loaded, lines: Sequence[dict[str, Any]]) -> float:
    """Return the forward FLOPs of the answers that a run wrote, from its rollouts.jsonl.

    A prompt runs all steps for each of its answers. A token that is fed back runs as many steps as
    its exit says, and the last one is never fed back. Each token has one readout.
    """
    return sum(_flops(loaded.model.config, loaded.recurrent_steps, line) for line in lines)


def _flops(config: DecoderCosts, steps: int, line: dict[str, Any]) -> float:
    prompt, exits = len(line["prompt"]), line["exit_steps"]
    token_steps = steps * prompt + sum(exits[1:])
    once = config.training_flops(prompt + len(exits), 1)  # of one step, forward and backward
    readout = 2 * config.dim * config.vocab_size
    return token_steps * (once.matrices + once.attention + once.gate) / 3 + len(exits) * readout
