"""Graphs that a latent-space model solves, and values that it repairs: `analyse solved`, `repair`.

    solved    every factor at every position is right, after one step more than the deepest graph
              of the set needs, as in the authors' code; an exam grades the values of names alone,
              after as many steps as each graph needs
    repair    told state before step t+1 ─► some values of depth t replaced ─► one step ─► right?

As in training with `model.corrupted=told`, values that were worked out in the step before are
replaced, each with the same probability. Unlike there, at least one is, and always by another
number.

Source: arXiv 2510.14095, "% fully solved", section 4.1 (mechanism 4) and Appendix B.4.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch

from titan_loop.analysis.steps.findings import Findings
from titan_loop.data.tasks.recorded_task import recorded_task
from titan_loop.errors import UserError, require_at_least
from titan_loop.evaluation.exam import ACCURACY, example_windows
from titan_loop.evaluation.task_report import ReadingResult, TaskReport, graded
from titan_loop.families.latent.model import LatentDecoder
from titan_loop.inference.loading import Loaded, load_checkpoint
from titan_loop.runs.saved_run import SavedRun
from titan_loop.tables import columns

from .task import DagArithmetic

_BATCH = 32


@torch.no_grad()
def share_solved(
    model: LatentDecoder, task: DagArithmetic, stratum: str, *, count: int
) -> tuple[float, int]:
    """Return the share of held-out graphs that are fully solved, and the number of steps.

    Args:
        model: Model in evaluation mode, not sharded; trained with a loss on every step.
        count: Number of graphs: the first that the exam draws, repetitions included.
    """
    questions = task.held_out_questions(count, task.strata[stratum])
    examples = [task.encode(question) for question in questions]
    windows = example_windows(stratum, examples, task.columns, room=model.config.max_seq_len)
    steps = 1 + max(task.depth(question) for question in questions)
    told_WLF = torch.cat(
        (windows.columns["solved"].unsqueeze(-1), windows.columns["factors"]), dim=-1
    )
    position_L = torch.arange(told_WLF.shape[1])
    length_W1 = torch.tensor([len(example.tokens) for example in examples]).unsqueeze(1)
    right: list[bool] = []
    for rows in torch.arange(count).split(_BATCH):
        output = model(
            windows.input[rows],
            windows.positions[rows],
            recurrent_steps=steps,
            collect="last",
            columns={"factors": windows.columns["factors"][rows]},
        )
        logits = model.lm_head(output.hidden_RBLD[-1], factors=True)
        said_BLF = torch.stack([logits_BLV.argmax(dim=-1) for logits_BLV in logits], dim=-1)
        wrong_BL = (said_BLF != told_WLF[rows]).any(dim=-1)
        right += (~(wrong_BL & (position_L < length_W1[rows])).any(dim=1)).tolist()
    return sum(right) / count, steps


@torch.no_grad()
def share_repaired(
    model: LatentDecoder,
    task: DagArithmetic,
    stratum: str,
    *,
    count: int,
    share: float = 0.5,
    seed: int = 0,
) -> float:
    """Return the share of held-out graphs whose corrupted values are all right after one step.

    Args:
        count: Number of graphs; each is corrupted at one random step up to its depth.
        share: Probability that a value is replaced by another one.
    """
    questions = task.held_out_questions(count, task.strata[stratum])
    examples = [task.encode(question) for question in questions]
    windows = example_windows(stratum, examples, task.columns, room=model.config.max_seq_len)
    generator = random.Random(seed)
    depth_WL, solved_WL = windows.columns["depth"], windows.columns["solved"]
    steps = [1 + int(generator.random() * task.depth(question)) for question in questions]
    step_W1 = torch.tensor(steps).unsqueeze(1)
    told_WL = torch.where(depth_WL <= step_W1, solved_WL, task.empty)
    hit_WL = torch.zeros_like(depth_WL, dtype=torch.bool)
    for row, step in enumerate(steps):
        new = (depth_WL[row] == step).nonzero().flatten().tolist()
        chosen = [at for at in new if generator.random() < share] or [generator.choice(new)]
        for at in chosen:
            other = 1 + int(generator.random() * (task.modulus - 1))
            told_WL[row, at] = (solved_WL[row, at] + other) % task.modulus
            hit_WL[row, at] = True
    right: list[bool] = []
    for rows in torch.arange(count).split(_BATCH):
        factors = windows.columns["factors"][rows]
        states = model(
            told_WL[rows],
            windows.positions[rows],
            recurrent_steps=1,
            columns={"factors": factors},
        ).hidden_RBLD
        said_BL = model.lm_head(states[0]).argmax(dim=-1)
        right += ((said_BL == solved_WL[rows]) | ~hit_WL[rows]).all(dim=1).tolist()
    return sum(right) / count


def repair(
    run: Path, *, strata: tuple[str, ...] = (), questions: int = 128, seed: int = 0
) -> Findings:
    """Corrupt values computed in the previous step; count the graphs that one step repairs.

    The shares are kept with the results of the checkpoint's tasks, as the task `repair`.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        strata: Sizes of graphs, such as 16_nodes; default all of the task's.
        questions: Number of graphs of each size.
        seed: Seed of the corrupted steps and values.
    """
    loaded, model, task = _open(run, discrete=True)

    def share(name: str) -> tuple[float, int]:
        return share_repaired(model, task, name, count=questions, seed=seed), 1

    found = _shares("repair", "repaired", loaded, task, strata, questions, share)
    return replace(found, record={**found.record, "seed": seed})


def solved(run: Path, *, strata: tuple[str, ...] = (), questions: int = 128) -> Findings:
    """Count graphs of which every factor at every position is right, the paper's metric.

    Runs one step more than the deepest of the graphs of a size needs. The shares are kept with the
    results of the checkpoint's tasks, as the task `solved` and the reading `deepest`.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        strata: Sizes of graphs, such as 16_nodes; default all of the task's.
        questions: Number of graphs of each size; the paper has 1,024.
    """
    loaded, model, task = _open(run, discrete=False)

    def share(name: str) -> tuple[float, int]:
        return share_solved(model, task, name, count=questions)

    return _shares("solved", "solved", loaded, task, strata, questions, share, reading="deepest")


def _shares(
    name: str,
    called: str,
    loaded: Loaded,
    task: DagArithmetic,
    strata: tuple[str, ...],
    questions: int,
    share: Callable[[str], tuple[float, int]],
    reading: str = "static:1",
) -> Findings:
    """Keep the shares of graphs by stratum, each with its number of steps, as results of a task."""
    require_at_least(1, questions=questions)
    for stratum in strata:
        if stratum not in task.strata:
            raise UserError(f"strata={stratum}: {task.name} has only {', '.join(task.strata)}")
    report = TaskReport(
        step=loaded.manifest["step"],
        tokens=loaded.manifest["trainer"]["tokens"],
        trained_recurrent_steps=loaded.recurrent_steps,
        manifest_sha256=loaded.manifest["sha256"],
    )
    rows = [["graphs", called, "steps"]]
    for stratum in strata or task.strata:
        found, steps = share(stratum)
        metrics = graded(ACCURACY, found, questions)
        result = ReadingResult(metrics=metrics, mean_steps=steps)
        report.tasks[f"{name}/{stratum}"] = {reading: result}
        rows.append([stratum, f"{found:.3f}", str(steps)])
    saved = report.save(loaded.run.directory)
    record = {"questions": questions, called: {row[0]: row[1] for row in rows[1:]}}
    return Findings(name=name, loaded=loaded, record=record, lines=[*columns(rows), str(saved)])


def _open(run: Path, *, discrete: bool) -> tuple[Loaded, LatentDecoder, DagArithmetic]:
    """Return a latent-space model with room for the task's largest graphs, and its task."""
    task = recorded_task(SavedRun.open(run).checkpoint().manifest["data"])
    if not isinstance(task, DagArithmetic):
        raise UserError(f"{run} was not trained on {DagArithmetic.name}, as this analysis needs")
    largest = task.positions(max(task.nodes, *task.test_nodes))
    loaded = load_checkpoint(run, use="analyse", context_tokens=largest)
    if not isinstance(loaded.model, LatentDecoder) or discrete > loaded.model.discrete:
        kind = "discrete model" if discrete else "model"
        raise UserError(f"{run} is not a {kind} of the family latent, as this analysis needs")
    return loaded, loaded.model, task
