"""Activation patching: the states of a question that its answer depends on.

    question a ─┬─ as it is ─────────────────────────────────────────► margin of a's answer
    question b ─┴─ b's state at one position, after one layer of one step, put into a's pass
                   ─► change of that margin

Source: recurrent-depth transformers, arXiv 2604.07822, Appendix H and Figure 18. Deviation: the
mean over many pairs of questions, where the paper shows one.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_loop.analysis.drawing import Axes, draw_axes
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps, open_task
from titan_loop.analysis.steps.layer_states import at_layer_visits
from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.task import Task
from titan_loop.evaluation.exam import question_windows
from titan_loop.inference.measures import logit_margin
from titan_loop.models.decoder import LoopDecoder

Visit = tuple[int, int]
"""Step and layer from 1; (0, 0) is the embedding."""


@torch.no_grad()
def patching(
    model: LoopDecoder, task: Task, stratum: str, *, steps: int, count: int
) -> tuple[list[Visit], np.ndarray]:
    """Return the visits, and the mean change of the answer's margin at each of them, (visits, L).

    Each of at least two questions, all of one length, is patched with the states of the next one.
    Of an answer of several tokens the first one counts.
    """
    device = model.tok_embeddings.weight.device
    questions = task.held_out_questions(count, task.strata[stratum])
    windows = question_windows(model, task, stratum, questions).rows(range(count), device)
    length = windows.input.shape[1]
    answer_B = (windows.labels != IGNORED).int().argmax(dim=1)
    token_B = windows.labels.gather(1, answer_B.unsqueeze(1))[:, 0]
    tiled = {name: values.repeat_interleave(length, 0) for name, values in windows.columns.items()}

    def margins(repeats: int) -> Tensor:
        """Run one pass over every question `repeats` times."""
        state = model(
            windows.input.repeat_interleave(repeats, 0),
            windows.positions.repeat_interleave(repeats, 0),
            recurrent_steps=steps,
            collect="last",
            columns=(windows.columns if repeats == 1 else tiled) or None,
        ).hidden_RBLD[-1]
        row = torch.arange(len(state), device=device)
        state_B1D = state[row, answer_B.repeat_interleave(repeats)].unsqueeze(1)
        return logit_margin(model.readout(state_B1D)[:, 0], token_B.repeat_interleave(repeats))

    kept: dict[Visit, Tensor] = {}

    def keep(step: int, layer: int, state_BLD: Tensor) -> None:
        kept[step, layer] = state_BLD

    def patched(state: Tensor, visit: Visit) -> Tensor:
        """Return a copy of the states per position, with another question's state there."""
        other_BLD = kept[visit].roll(-1, dims=0)
        copies_BLLD = state.unflatten(0, (count, length)).clone()
        position = torch.arange(length, device=device)
        copies_BLLD[:, position, position] = other_BLD
        return copies_BLLD.flatten(0, 1)

    with at_layer_visits(model, keep, embedding=True):
        clean_B = margins(1)
    visits, changes = [*kept], []
    for visit in visits:

        def put(step: int, layer: int, state: Tensor, at: Visit = visit) -> Tensor | None:
            return patched(state, at) if (step, layer) == at else None

        with at_layer_visits(model, put, embedding=True):
            changes.append(margins(length))
    change = torch.stack(changes).unflatten(1, (count, length)) - clean_B.unsqueeze(1)
    return visits, change.double().mean(1).cpu().numpy()


def analyse_patching(
    run: Path,
    *,
    stratum: str | None = None,
    recurrent_steps: int | None = None,
    questions: int = 32,
) -> Findings:
    """Replace every single state by another question's, and measure the effect on the answer.

    For runs on a generated task: the change of the answer's logit margin, by position, step and
    layer (activation patching). Writes evals/patching-step-N.json and a plot that `report` shows.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        stratum: Stratum of the task's exam, whose questions have one length; default the last.
        recurrent_steps: R; default as in training.
        questions: Number of questions, each patched with the states of the next.
    """
    asked = () if stratum is None else (stratum,)
    loaded, task, names = open_task(run, asked, questions, least=2)
    steps, name = chosen_steps(recurrent_steps, loaded), names[-1]
    visits, change = patching(loaded.model, task, name, steps=steps, count=questions)
    step, layer = visits[int(change.min(axis=1).argmin())]
    position = int(change.min(axis=0).argmin())
    said = (
        f"{name}: the margin falls most, by {-change.min():.3f}, at position {position} after "
        f"layer {layer} of step {step}"
    )
    record = {"stratum": name, "questions": questions, "visits": visits, "change": change.tolist()}
    figure = Figure(
        "Activation patching",
        "Change of the answer's logit margin when one state is replaced by another question's.",
        partial(_draw, visits, change, said),
    )
    figures = {"patching.png": figure}
    return Findings(name="patching", loaded=loaded, record=record, lines=[said], figures=figures)


def _draw(visits: Sequence[Visit], change: np.ndarray, title: str, path: Path) -> Path:
    def draw(axes: Axes) -> None:
        most = float(np.abs(change).max()) or 1.0
        image = axes.imshow(
            change, origin="lower", aspect="auto", vmin=-most, vmax=most, cmap="RdBu"
        )
        axes.figure.colorbar(image, label="change of the logit margin")
        names = ["embedding", *(f"{step}.{layer}" for step, layer in visits[1:])]
        every = -(-len(names) // 20)
        axes.set_yticks(range(0, len(names), every), names[::every])
        axes.set_xticks(range(0, change.shape[1], -(-change.shape[1] // 20)))
        axes.set_xlabel("position")
        axes.set_ylabel("step.layer")
        axes.grid(visible=False)

    return draw_axes(draw, path, title=title)
