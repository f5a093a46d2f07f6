"""A task's exam after every recurrent step: accuracy, logit margins, and where policies halt.

    exam ─► one pass to step R ─► accuracy and margin after 1 … R, accuracy and steps of each policy

With hops or sizes as strata this shows the number of steps that a question needs, the gain from
more steps than were trained, and *overthinking*: a margin that falls again with further steps.

*Learned* has two definitions. The paper counts hops up to the last exam that the curriculum passed
in training. We give an exam to the analysed checkpoint, and take the best of the trained steps:
this also shows forgetting after a promotion, and learning after the last one.

Source: recurrent-depth transformers, arXiv 2604.07822, §6.1 (learnable depth), §6.3 (Figures 5, 8
and 9) and Appendix F (generalisation ratio).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from titan_loop.analysis.drawing import depth_colors, draw_axes, draw_panels, series_colors
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import ACCURACY, Exam
from titan_loop.evaluation.readings import Reading, depth_readings, policy_reading
from titan_loop.evaluation.window_scores import Forward, at_readings, sum_windows
from titan_loop.inference.exit_policy import require_exit_policy
from titan_loop.inference.measures import logit_margin
from titan_loop.models.decoder import LoopDecoder
from titan_loop.tables import columns

from .first_hits import (
    FirstHits,
    draw_first_hits,
    first_hits,
)
from .updates_to_learn import draw_updates, updates_to_learn

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LEARNED, _REACHED = 0.95, 0.6


@dataclass(frozen=True)
class Halting:
    """Share of right answers and mean halting step of an exit policy on one stratum."""

    accuracy: float
    mean_steps: float


@dataclass(frozen=True)
class StepExam:
    """Results on one stratum.

    Attributes:
        accuracy: Share of right answers after each of R steps, (R,).
        margin: Mean of the answer's logit minus the largest other logit, (R,).
        halting: Exit policy → its results; a policy halts each question separately.
        first_hits: First step after which an answer is right.
    """

    accuracy: np.ndarray
    margin: np.ndarray
    halting: Mapping[str, Halting]
    first_hits: FirstHits

    @property
    def reached(self) -> bool:
        """Whether 60 % of the answers are right after some step."""
        return bool(self.accuracy.max() >= _REACHED)


def step_exam(
    model: LoopDecoder,
    task: Task,
    strata: Sequence[str],
    *,
    steps: int,
    count: int,
    policies: Sequence[str] = (),
) -> dict[str, StepExam]:
    """Return stratum → results after every step.

    Args:
        task: The task that the model was trained on.
        steps: R, which may exceed the trained R.
        count: Number of questions of each stratum.
        policies: Exit policies in the notation of `--exit`; they run at most R steps.

    Raises:
        UserError: A policy is unknown, or the model does not have it.
    """
    depths = depth_readings(range(1, steps + 1))
    adaptive = [policy_reading(name, steps) for name in policies]
    for reading in adaptive:
        require_exit_policy(model, reading.policy)
    readings, device = [*depths, *adaptive], model.tok_embeddings.weight.device
    exam = Exam(
        task,
        count,
        vocab_size=model.config.vocab_size,
        room=model.config.max_seq_len,
        strata=strata,
    )
    forward = at_readings(model, readings, value="right_PT")
    graded = exam.grade(
        [reading.name for reading in readings],
        lambda windows: sum_windows(windows, forward, device=device),
    )
    found = {}
    for name, windows in exam.windows.items():
        sums_RW, right_RW = sum_windows(windows, _margins_at(model, depths), device=device)
        labels_W = (windows.labels != IGNORED).sum(dim=1).numpy()
        results = graded[name]
        found[name.partition("/")[2] or next(iter(task.strata))] = StepExam(
            accuracy=np.array([results[depth.name].metrics[ACCURACY] for depth in depths]),
            margin=(sums_RW / labels_W).mean(axis=1),
            halting={
                reading.name: Halting(
                    results[reading.name].metrics[ACCURACY], results[reading.name].mean_steps or 0.0
                )
                for reading in adaptive
            },
            first_hits=first_hits(right_RW > 0),
        )
    return found


def _margins_at(model: LoopDecoder, depths: Sequence[Reading]) -> Forward:
    """Return the margins of the labels, summed over each window, and whether all are above 0."""

    @torch.no_grad()
    def forward(windows: HeldOutWindows) -> tuple[Tensor, Tensor]:
        chosen_BL = windows.labels != IGNORED
        output = model(
            windows.input,
            windows.positions,
            recurrent_steps=len(depths),
            collect="all",
            columns=windows.columns or None,
        )
        states = [state_BLD[chosen_BL] for state_BLD in output.hidden_RBLD]
        labels_T, lengths = windows.labels[chosen_BL], chosen_BL.sum(dim=1).tolist()
        margins = [
            logit_margin(model.readout(state_TD.unsqueeze(0))[0], labels_T) for state_TD in states
        ]
        windows_RT = torch.stack(margins).split(lengths, 1)
        sums_RB = torch.stack([part.double().sum(1) for part in windows_RT], dim=1)
        return sums_RB, torch.stack([(part > 0).all(1) for part in windows_RT], dim=1)

    return forward


@dataclass(frozen=True)
class Reach:
    """A model's progress through a task's strata, from easy to hard.

    Attributes:
        learned: Number of strata before the first below 95 % accuracy at the best trained step.
        reached: Number of strata before the first below 60 % accuracy at the best step.
        passed: Number of strata up to the last whose exam was passed in training, the paper's
            `learned`; None without a curriculum.
    """

    learned: int
    reached: int
    passed: int | None = None

    @property
    def ratio(self) -> float:
        """The generalisation ratio; 1 means no extrapolation."""
        return self.reached / self.learned if self.learned else float("nan")

    @property
    def paper_ratio(self) -> float:
        """The paper's generalisation ratio, `reached` over `passed`; NaN without `passed`."""
        return self.reached / self.passed if self.passed else float("nan")

    def lines(self) -> list[str]:
        """Return a line with the paper's ratio, if there is one, then one with ours."""
        ours = f"learned {self.learned}, reached {self.reached}: generalisation ratio"
        passed = f"passed in training {self.passed}, reached {self.reached}: the paper's ratio"
        paper = [] if self.passed is None else [f"{passed} {self.paper_ratio:.2f}"]
        return [*paper, f"{ours} {self.ratio:.2f}"]


def passed_in_training(task: Task, loader_state: Mapping[str, Any]) -> int | None:
    """Return the number of strata up to the last that a curriculum has passed.

    Args:
        loader_state: State of the run's loader, as in a manifest's `data`.

    Returns:
        0 before the first promotion; None for a run without a curriculum. The last level never
        counts: it has no exam.
    """
    promotions = loader_state.get("promotions")
    if promotions is None:
        return None
    strata, levels = list(task.strata), range(len(promotions))
    passed = [strata.index(name) + 1 for level in levels for name in task.level_strata(level)]
    return max(passed, default=0)


def reach(found: Sequence[StepExam], trained_steps: int, passed: int | None = None) -> Reach:
    """Return the progress through strata that are ordered from easy to hard."""

    def count(passes: list[bool]) -> int:
        return next((index for index, passed in enumerate(passes) if not passed), len(passes))

    return Reach(
        count([bool(exam.accuracy[:trained_steps].max() >= _LEARNED) for exam in found]),
        count([exam.reached for exam in found]),
        passed,
    )


def analyse_steps(
    run: Path,
    *,
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    exit: tuple[str, ...] = (),
    questions: int = 256,
) -> Findings:
    """Ask the exam after every step: accuracy, logit margin, and the steps of exit policies.

    For runs on a generated task. If the task has levels and all strata are asked, it also counts
    the strata learned (95 % right within the trained steps) and reached (60 % right after any
    number of steps), and prints reached/learned, the generalisation ratio. After a curriculum it
    also counts the strata passed in training, which the paper calls learned, and the training
    steps until then (Figure 6). Median and quartiles of the first step with a right answer are
    recorded (Figure 8). Writes evals/steps-step-N.json and plots that `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        strata: Strata of the task's exam; default all.
        recurrent_steps: R; default twice the trained R.
        exit: Exit policies to examine besides the fixed depths, such as kl:0.01,3; kl:0.01,inf
            ignores the entropy.
        questions: Number of questions of each stratum.
    """
    loaded, task, names = open_task(run, strata, questions)
    recurrence = loaded.manifest["trainer"].get("recurrence", {})
    trained = recurrence.get("max_steps") or loaded.recurrent_steps
    depth = chosen_steps(2 * trained if recurrent_steps is None else recurrent_steps, loaded)
    found = step_exam(loaded.model, task, names, steps=depth, count=questions, policies=exit)
    shown = sorted({1, trained, depth, *(2**power for power in range(depth.bit_length()))})
    rows = [["stratum", *(f"R={step}" for step in shown), *exit]]
    for name, exam in found.items():
        row = [name, *(f"{exam.accuracy[step - 1]:.3f}" for step in shown)]
        row += [f"{h.accuracy:.3f} in {h.mean_steps:.1f}" for h in exam.halting.values()]
        rows.append(row)
    lines = columns(rows)
    record: dict[str, Any] = {"questions": questions, "trained_steps": trained, "strata": {}}
    for name, exam in found.items():
        record["strata"][name] = {
            "accuracy": exam.accuracy.tolist(),
            "margin": exam.margin.tolist(),
            "halting": {policy: asdict(halting) for policy, halting in exam.halting.items()},
            "first_hits": exam.first_hits._asdict(),
        }
    if task.levels > 1 and not strata:
        passed = passed_in_training(task, loaded.manifest["data"])
        far = reach([*found.values()], trained, passed)
        lines += far.lines()
        record |= {"learned": far.learned, "reached": far.reached}
        record |= {} if passed is None else {"passed_in_training": passed}
    levels = len(loaded.manifest["data"].get("promotions", []))
    if updates := updates_to_learn(loaded.run.directory, task, levels):
        record["updates_to_learn"] = updates
    figures = {
        "step-accuracy.png": Figure(
            "The exam after every recurrent step",
            "Share of right answers; the line is the trained number of steps.",
            partial(_draw_accuracy, found, trained),
        ),
        "step-margin.png": Figure(
            "Logit margin over recurrent steps",
            "Logit of the right answer minus the strongest other token's; a margin that falls "
            "again is overthinking. The bar is the trained number of steps; a dot is the median "
            "first step with a right answer.",
            partial(_draw_margins, found, trained),
        ),
    }
    answered = {name: exam.first_hits for name, exam in found.items() if exam.reached}
    results = {
        f"{task.name}/{name}/first_hit/{quartile}": step
        for name, hits in answered.items()
        for quartile, step in zip(("lower", "median", "upper"), hits, strict=False)
    }
    results |= {f"{task.name}/{name}/updates/to_learn": step for name, step in updates.items()}
    if answered:
        figures["step-first-hits.png"] = Figure(
            "First steps with a right answer",
            f"Median and quartiles, for strata of which {_REACHED:.0%} are right after some step.",
            partial(draw_first_hits, answered, trained),
        )
    if updates:
        figures["updates-to-learn.png"] = Figure(
            "Training steps until each exam is passed",
            "Steps at which the curriculum went on to the next level.",
            partial(draw_updates, updates),
        )
    if exit:
        figures["step-halting.png"] = Figure(
            "Where exit policies halt",
            "Mean recurrent steps, and the share of right answers.",
            partial(_draw_halting, found),
        )
    return Findings(
        name="steps", loaded=loaded, record=record, lines=lines, figures=figures, results=results
    )


def _draw_accuracy(found: Mapping[str, StepExam], trained_steps: int, path: Path) -> Path:
    def draw(axes: "Axes") -> None:
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


def _draw_margins(found: Mapping[str, StepExam], trained_steps: int, path: Path) -> Path:
    def draw(axes: "Axes") -> None:
        for (name, exam), color in zip(found.items(), depth_colors(len(found)), strict=True):
            steps = range(1, len(exam.margin) + 1)
            axes.plot(steps, exam.margin, color=color, label=name)
            if exam.reached:
                hit = round(exam.first_hits.median)
                axes.plot(hit, exam.margin[hit - 1], "o", markersize=4, color=color)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.axvline(trained_steps, color="0.8", linewidth=6, alpha=0.5, zorder=0)
        axes.set_xlabel("recurrent steps")
        axes.set_ylabel("logit margin of the answer")

    # A fall counts only where the mean margin was above 0, so that the right answer led.
    falls = [name for name, exam in found.items() if 0 < exam.margin.max() != exam.margin[-1]]
    title = f"The margin falls again after its peak in {len(falls)} of {len(found)} strata"
    return draw_axes(draw, path, title=title)


def _draw_halting(found: Mapping[str, StepExam], path: Path) -> Path:
    panels = {"mean recurrent steps": "mean_steps", "share of right answers": "accuracy"}
    policies = next(iter(found.values())).halting

    def draw(axes: "Axes", name: str) -> None:
        for policy, color in series_colors([*policies]).items():
            values = [getattr(exam.halting[policy], panels[name]) for exam in found.values()]
            style = {"color": color, "marker": "o", "markersize": 3, "label": policy}
            axes.plot(range(len(found)), values, **style)
        axes.set_xticks(range(len(found)), found, rotation=60, ha="right")

    shares = {p: np.mean([exam.halting[p].accuracy for exam in found.values()]) for p in policies}
    best = max(shares, key=shares.__getitem__)
    title = f"{best} answers most, {shares[best]:.0%} over all strata"
    return draw_panels(list(panels), draw, path, title=title, columns=2)
