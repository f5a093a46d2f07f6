"""Expected iterations of layers that loop against cross entropy, over training.

    metrics.jsonl ─ E[n_ℓ], CE ─► running means ─┬─ one line a layer
                                                └─ onset: the CE at which the mean E[n] is smallest

Source: Frey et al. 2026, "Adaptive loops and memory in transformers", Figures 2 (right) and 3: E[n]
falls at first and rises from a cross entropy of 3.27 ± 0.59 nats on, whatever N_max is. Deviation:
the cross entropy of training. The paper's is of validation; on text that is read once the two
agree, while Capo repeats its people.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_loop.analysis.drawing import (
    Axes,
    Records,
    depth_colors,
    draw_axes,
    series,
    smoothed,
    steps_with,
)
from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.errors import UserError
from titan_loop.families.adaptive.layer_plots import LOOPS
from titan_loop.inference.loading import load_checkpoint


class Loops(NamedTuple):
    """Running means over a run's N records, in the order of training.

    Attributes:
        nats: Cross entropy, (N,).
        iterations: E[n_ℓ] of every layer that loops, (layers, N).
    """

    nats: np.ndarray
    iterations: np.ndarray

    @property
    def lowest(self) -> int:
        """Record at which the mean over layers is smallest; it rises from there on."""
        return int(self.iterations.mean(axis=0).argmin())


def loops_of(records: Records) -> Loops:
    """Return the running means of the records of `metrics.jsonl` that have iterations."""
    layers = steps_with(records, LOOPS)
    having = [record for record in records if f"{LOOPS}1" in record]
    return Loops(
        smoothed(series(having, "ce/step_1")),
        np.array([smoothed(series(having, f"{LOOPS}{layer}")) for layer in layers]),
    )


def analyse_loops(run: Path) -> Findings:
    """Draw the expected iterations of layers that loop against cross entropy, over training.

    Writes evals/loops-step-N.json and a plot that `report` shows.

    Args:
        run: Run of the family adaptive.
    """
    loaded = load_checkpoint(run, use="generate")
    records = loaded.run.directory.read_metrics()
    if not steps_with(records, LOOPS):
        raise UserError(
            f"{run} is no run that recorded iterations; give a run of family adaptive with "
            "model.max_iterations"
        )
    own = loops_of(records)
    onset = float(own.nats[own.lowest])
    results = {"loops/onset_nats/lowest": round(onset, 5)}
    rows = [["expected iterations", "at first", "lowest", "at the end"]]
    for layer, values in enumerate(own.iterations, start=1):
        shown = {"start": values[0], "lowest": values[own.lowest], "end": values[-1]}
        rows.append([f"layer {layer}", *(f"{value:.3f}" for value in shown.values())])
        for when, value in shown.items():
            results[f"loops/layer_{layer}/iterations/{when}"] = round(float(value), 5)
    figure = Figure(
        "Iterations against the loss",
        "Training goes from left to right. Running means of the expected iterations and of the "
        "cross entropy.",
        partial(_draw, own),
    )
    return Findings(
        name="loops",
        loaded=loaded,
        record={"onset_nats": onset},
        tables={"Iterations over training": rows},
        lines=[f"layers loop least at a cross entropy of {onset:.3f} nats"],
        figures={"loops-by-loss.png": figure},
        results=results,
    )


def _draw(loops: Loops, path: Path) -> Path:
    def draw(axes: Axes) -> None:
        colors = depth_colors(len(loops.iterations))
        for layer, (values, color) in enumerate(zip(loops.iterations, colors, strict=True)):
            style = {"color": color, "marker": "o", "markersize": 3}
            axes.plot(loops.nats, values, label=f"layer {layer + 1}", **style)
        axes.invert_xaxis()
        axes.set_xlabel("training cross entropy (nats per label), falling")
        axes.set_ylabel("expected iterations E[n]")

    mean, least = loops.iterations.mean(axis=0), loops.lowest
    title = f"Layers loop least, {mean[least]:.2f} times, at a loss of {loops.nats[least]:.2f} nats"
    return draw_axes(draw, path, title=f"{title}, and {mean[-1]:.2f} times at the end")
