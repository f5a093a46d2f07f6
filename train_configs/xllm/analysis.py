"""`titan-loop analyse learned-depths RUN`: the distribution of depths that a run has learned."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_loop.analysis.drawing import depth_colors, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import UserError
from titan_loop.families.xllm.prior import KEY
from titan_loop.inference.loading import load_checkpoint
from titan_loop.runs.saved_run import SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOMENTS = {"start": 0.0, "quarter": 0.25, "half": 0.5, "end": 1.0}
_SHOWN = 16  # largest depth in the table and the plot


def learned_depths(run: Path) -> Findings:
    """Show the learned distribution at every checkpoint, with its mean and entropy over training.

    Args:
        run: A run with `LearnedDepth` (its newest checkpoint is taken), or its checkpoints/step-N.
    """
    loaded = load_checkpoint(run, use="generate")
    by_step = _distributions(loaded.run, loaded.manifest["step"])
    records = [
        record
        for record in loaded.run.directory.read_metrics()
        if record["step"] <= loaded.manifest["step"] and f"{KEY}/mean" in record
    ]
    if not by_step or not records:
        raise UserError(f"{run} has no learned distribution of depths; train with LearnedDepth")
    moved = [["", "step", "mean", "entropy, nats"]]
    results: dict[str, float] = {}
    for moment, share in _MOMENTS.items():
        record = records[round(share * (len(records) - 1))]
        values = {name: record[f"{KEY}/{name}"] for name in ("mean", "entropy")}
        moved.append([moment, str(record["step"]), *(f"{value:.3f}" for value in values.values())])
        results |= {f"learned_depths/{name}/{moment}": value for name, value in values.items()}
    shown = min(_SHOWN, *map(len, by_step.values()))
    depths = [["step", *(f"R {depth}" for depth in range(1, shown + 1))]]
    for step, probabilities in by_step.items():
        depths.append([str(step), *(f"{p:.3f}" for p in probabilities[:shown])])
    figure = Figure(
        "Learned depths",
        "Mean of the distribution over training, and the probabilities of depths at checkpoints",
        partial(_draw, records, by_step),
    )
    return Findings(
        name="learned-depths",
        loaded=loaded,
        record={"probabilities": {str(step): p for step, p in by_step.items()}},
        tables={"The distribution over training": moved, "Probabilities of R steps": depths},
        figures={"learned-depths.png": figure},
        results=results,
    )


def _distributions(run: SavedRun, last: int) -> dict[int, list[float]]:
    """Return training step → probabilities of R = 1, 2, … for every checkpoint up to `last`."""
    found: dict[int, list[float]] = {}
    for step in run.steps():
        state = read_manifest(run.directory.checkpoint(step))["trainer"].get(KEY)
        if state is not None and step <= last:
            logits = torch.tensor(state["logits"], dtype=torch.float64)
            found[step] = logits.softmax(0).tolist()
    return found


def _draw(records: list[dict[str, Any]], by_step: dict[int, list[float]], path: Path) -> Path:
    def panel(axes: "Axes", name: str) -> None:
        if name == "mean of R":
            axes.plot([r["step"] for r in records], [r[f"{KEY}/mean"] for r in records])
            axes.set(xlabel="training step")
            return
        for (step, probabilities), color in zip(
            by_step.items(), depth_colors(len(by_step)), strict=True
        ):
            shown = probabilities[:_SHOWN]
            axes.plot(range(1, len(shown) + 1), shown, color=color, label=f"step {step}")
        axes.set(xlabel="R")

    start, end = (record[f"{KEY}/mean"] for record in (records[0], records[-1]))
    title = f"The learned mean of R went from {start:.2f} to {end:.2f}"
    return draw_panels(["mean of R", "probability of R"], panel, path, title=title)
