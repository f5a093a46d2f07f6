"""One picture of `norms.jsonl`: states, gradients and updates by layer and recurrent step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_loop.analysis.drawing import Axes, depth_colors, draw_panels, token_axis

_STATES, _GRADIENTS = "RMS of states, newest record", "gradient at states, newest record"
_PARTS, _UPDATES = "gradient of weights", "update / weights"


def plot_norms(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the newest record as two maps, and all records as curves, one colour per layer."""
    newest = records[-1]
    tokens = np.array([float(record["tokens"]) for record in records])
    parts = [*newest["weight"]]
    colors = dict(zip(parts, depth_colors(len(parts)), strict=True))
    updates = {part: _updates(records, part)[-1] for part in parts}

    def draw(axes: Axes, name: str) -> None:
        if name in (_STATES, _GRADIENTS):
            _draw_map(axes, newest["state_rms" if name == _STATES else "state_gradient"])
            return
        for part, color in colors.items():
            updated = name == _UPDATES
            values = _updates(records, part) if updated else _curve(records, part, "gradient")
            label = f"layer {part}" if part.isdecimal() else part
            axes.plot(tokens, values, color=color, linewidth=1, marker=".", label=label)
        axes.set_yscale("log")
        token_axis(axes, tokens)

    names = [_STATES, _GRADIENTS, _PARTS, _UPDATES]
    most = max(parts, key=lambda part: np.nan_to_num(updates[part]))
    title = f"At step {newest['step']:,} {most} moves most: by {updates[most]:.1e} of its norm"
    return draw_panels(names, draw, path, title=title, columns=2)


def _draw_map(axes: Axes, rows: Sequence[Sequence[float | None]]) -> None:
    values = np.array(rows, dtype=np.float64)  # null becomes NaN, and stays white
    with np.errstate(divide="ignore"):
        image = axes.imshow(
            np.log10(values),
            origin="lower",
            aspect="auto",
            cmap="viridis",
            extent=(-0.5, values.shape[1] - 0.5, -0.5, len(values) - 0.5),
        )
    axes.figure.colorbar(image, ax=axes, label="log10")
    if np.isnan(values[0]).all():  # no layer stands outside the loop
        axes.set_ylim(0.5, len(values) - 0.5)
    axes.set_xlabel("layer")
    axes.set_ylabel("recurrent step (0: outside the loop)")
    axes.grid(visible=False)


def _updates(records: Sequence[Mapping[str, Any]], part: str) -> np.ndarray:
    return _curve(records, part, "update") / _curve(records, part, "weight")


def _curve(records: Sequence[Mapping[str, Any]], part: str, kind: str) -> np.ndarray:
    values = (record[kind].get(part) for record in records)
    return np.array([np.nan if v is None or v == 0 else v for v in values], dtype=np.float64)
