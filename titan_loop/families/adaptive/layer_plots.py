"""The plot of a model whose layers loop: iterations, scales and gates over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_loop.analysis.drawing import (
    Chart,
    depth_colors,
    draw_curve,
    draw_panels,
    last,
    series,
    steps_with,
    token_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOPS, SCALES = "loops/layer_", "loop_scale/layer_"
_PANELS = {
    "expected iterations": LOOPS,
    "gate of its own memory": "memory_gate/local_",
    "gate of the shared memory": "memory_gate/global_",
}


def plot_layers(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw iterations, loop scales and memory gates against tokens, one line per layer."""
    keys = {key for record in records for key in record}
    panels = {
        name: prefix
        for name, prefix in _PANELS.items()
        if any(key.startswith(prefix) for key in keys)
    }
    scales = [key.removeprefix(SCALES).split("_") for key in keys if key.startswith(SCALES)]
    for iteration in sorted({int(number) for _, number in scales}):
        panels[f"loop scale of iteration {iteration}"] = SCALES

    def draw(axes: "Axes", name: str) -> None:
        prefix, suffix = panels[name], ""
        layers = sorted({int(layer) for layer, _ in scales})
        if prefix == SCALES:
            suffix = f"_{name.rpartition(' ')[2]}"
        else:
            layers = steps_with(records, prefix)
        tokens = series(records, "tokens")
        for layer, color in zip(layers, depth_colors(len(layers)), strict=True):
            values = series(records, f"{prefix}{layer}{suffix}")
            draw_curve(axes, tokens, values, color, label=f"layer {layer}")
        token_axis(axes, tokens)

    ends = {layer: last(series(records, f"{LOOPS}{layer}")) for layer in steps_with(records, LOOPS)}
    title = "Gates of the memory, by layer"
    if ends:
        most = max(ends, key=ends.__getitem__)
        title = f"Layer {most} loops most, {ends[most]:.2f} times on average at the end"
    return draw_panels(list(panels), draw, path, title=title)


def _has_layers(keys: set[str]) -> bool:
    return any(key.startswith(prefix) for prefix in _PANELS.values() for key in keys)


LAYERS = Chart(
    "Loops and memory by layer",
    "Expected iterations of every layer, the scales of its loop, and the mean gates that let "
    "memory in; darker lines are deeper layers.",
    _has_layers,
    plot_layers,
)
