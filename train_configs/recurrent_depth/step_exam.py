"""A task's exam after every recurrent step: accuracy and first hits.

    exam ─► one pass to step R ─► right after 1 … R? ─► t* = min { r : right after step r }

A guess is a first hit, too, here as in the paper, so that many steps before the answer is found
make the lower quartile of t* too early. `titan-loop eval --exit` has the steps at which a policy
halts.

Source: recurrent-depth transformers, arXiv 2604.07822, §6.2 and §6.3 (Figures 5, 6, 8 and 9).
Deviation: Figure 8 has the mean t* of each number of hops, here median and quartiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_loop.analysis.drawing import Axes, draw_axes
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.evals_log import EVALS_FIELDS, PROMOTION
from titan_loop.evaluation.exam import Exam
from titan_loop.evaluation.readings import depth_readings
from titan_loop.evaluation.window_scores import at_readings, sum_windows
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

_REACHED = 0.6


class FirstHits(NamedTuple):
    """Quartiles of t* over the questions that are right after some step, and their share.

    The quartiles are NaN if there is no such question.
    """

    lower: float
    median: float
    upper: float
    share: float


@dataclass(frozen=True)
class StepExam:
    """Results on one stratum.

    Attributes:
        accuracy: Share of right answers after each of R steps, (R,).
    """

    accuracy: np.ndarray
    first_hits: FirstHits

    @property
    def reached(self) -> bool:
        """Whether 60 % of the answers are right after some step."""
        return bool(self.accuracy.max() >= _REACHED)


def first_hits(right_RW: np.ndarray) -> FirstHits:
    """Return the first hits of W questions, from whether each is right after R steps."""
    hit_W = right_RW.any(axis=0)
    if not hit_W.any():
        return FirstHits(np.nan, np.nan, np.nan, 0.0)
    steps = 1 + right_RW.argmax(axis=0)[hit_W]
    # "lower" keeps a quartile a number of steps that some question has.
    lower, median, upper = np.quantile(steps, (0.25, 0.5, 0.75), method="lower").tolist()
    return FirstHits(lower, median, upper, float(hit_W.mean()))


def step_exam(
    model: LoopDecoder, task: Task, strata: Sequence[str], *, steps: int, count: int
) -> dict[str, StepExam]:
    """Return stratum → results after every step."""
    exam = Exam(
        task,
        count,
        vocab_size=model.config.vocab_size,
        room=model.config.max_seq_len,
        strata=strata,
    )
    forward = at_readings(model, depth_readings(range(1, steps + 1)), value="right_PT")
    found = {}
    for name, windows in exam.windows.items():
        device = model.tok_embeddings.weight.device
        labels_RW, _ = sum_windows(windows, forward, device=device)
        right_RW = labels_RW == (windows.labels != IGNORED).sum(dim=1).numpy()
        found[name.partition("/")[2] or next(iter(task.strata))] = StepExam(
            accuracy=right_RW.mean(axis=1), first_hits=first_hits(right_RW)
        )
    return found


def updates_to_learn(run: RunDirectory, task: Task, levels: int) -> dict[str, int]:
    """Return stratum → training steps until its exam was passed, for the passed `levels`.

    A level's last exam is the one that it passed. Where a run went back and repeated exams, the
    later ones count.
    """
    asked: dict[str, int] = {}
    for record in read_jsonl(run.evals_jsonl, EVALS_FIELDS):
        if record["asked"] == PROMOTION:
            asked |= {name.split("/")[1]: record["step"] for name in record["results"]}
    passed = [name for level in range(levels) for name in task.level_strata(level)]
    return {name: asked[name] for name in passed if name in asked}


def analyse_steps(
    run: Path,
    *,
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    questions: int = 256,
) -> Findings:
    """Ask the exam after every step: accuracy, and first right answers.

    For runs on a generated task. Median and quartiles of the first step with a right answer are
    recorded, and after a curriculum the training steps until each exam was passed. Writes
    evals/steps-step-N.json and a plot that `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        strata: Strata of the task's exam; default all.
        recurrent_steps: R; default twice the trained R.
        questions: Number of questions of each stratum.
    """
    loaded, task, names = open_task(run, strata, questions)
    recurrence = loaded.manifest["trainer"].get("recurrence", {})
    trained = recurrence.get("max_steps") or loaded.recurrent_steps
    depth = chosen_steps(2 * trained if recurrent_steps is None else recurrent_steps, loaded)
    found = step_exam(loaded.model, task, names, steps=depth, count=questions)
    shown = sorted({1, trained, depth, *(2**power for power in range(depth.bit_length()))})
    rows = [["stratum", *(f"R={step}" for step in shown)]]
    record: dict[str, Any] = {"questions": questions, "trained_steps": trained, "strata": {}}
    results: dict[str, float] = {}
    for name, exam in found.items():
        rows.append([name, *(f"{exam.accuracy[step - 1]:.3f}" for step in shown)])
        record["strata"][name] = {
            "accuracy": exam.accuracy.tolist(),
            "first_hits": exam.first_hits._asdict(),
        }
        if exam.reached:
            for quartile in ("lower", "median", "upper"):
                step = getattr(exam.first_hits, quartile)
                results[f"{task.name}/{name}/first_hit/{quartile}"] = step
    levels = len(loaded.manifest["data"].get("promotions", []))
    if updates := updates_to_learn(loaded.run.directory, task, levels):
        record["updates_to_learn"] = updates
        results |= {f"{task.name}/{name}/updates/to_learn": step for name, step in updates.items()}
    figure = Figure(
        "The exam after every recurrent step",
        "Share of right answers; the line is the trained number of steps.",
        partial(_draw, found, trained),
    )
    return Findings(
        name="steps",
        loaded=loaded,
        record=record,
        tables={"The exam after recurrent steps": rows},
        figures={"step-accuracy.png": figure},
        results=results,
    )


def _draw(found: Mapping[str, StepExam], trained_steps: int, path: Path) -> Path:
    def draw(axes: Axes) -> None:
        shares = 100 * np.array([exam.accuracy for exam in found.values()]).T
        steps = len(shares)
        image = axes.imshow(
            shares,
            origin="lower",
            aspect="auto",
            vmin=0,
            vmax=100,
            cmap="viridis",
            extent=(-0.5, len(found) - 0.5, 0.5, steps + 0.5),
        )
        axes.figure.colorbar(image, label="% right")
        axes.axhline(trained_steps + 0.5, color="tab:red", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(found)), found, rotation=45, ha="right")
        axes.set_ylabel("recurrent steps (dashed: the most in training)")
        axes.grid(visible=False)

    right = [name for name, exam in found.items() if exam.reached]
    title = f"{len(right)} of {len(found)} strata reach {_REACHED:.0%} after some number of steps"
    return draw_axes(draw, path, title=title)
