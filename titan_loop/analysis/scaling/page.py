"""The files of a scaling study: `scaling.json`, and `scaling.html` with fits and residuals."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_loop.analysis.drawing import depth_colors, draw_panels, short
from titan_loop.analysis.page import Section, page
from titan_loop.analysis.scaling.study import FittedLaw, ScalingStudy, sizes_of
from titan_loop.storage.json_files import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = {
    "total loss": (
        "Ouro, 5 sizes, R = 2, 4, 8, 20B tokens: R2 0.9596; held out: 2 of 5 sizes 0.9542, first "
        "25/50/75 % of tokens 0.9385/0.9609/0.962, one R of three 0.9581."
    ),
    "steps of R = 2": "Ouro: R2 0.8898; held out: sizes 0.8815, tokens 0.8686/0.8882/0.8896.",
    "steps of R = 4": (
        "Ouro: R2 0.8146; held out: sizes 0.797, tokens 0.793/0.813/0.8142, steps 0.8118."
    ),
    "steps of R = 8": "Ouro: R2 0.795.",
    "worth of a step": "Published values of phi: 0.46 (arXiv 2604.21106).",
}
"""Figures of the paper beside each fit (arXiv 2510.25741, Appendices D and E)."""

_PAPER_COMPOSITION = "Ouro, R = 4, exit distribution measured on MMLU: R2 0.961."


def write_study(result: ScalingStudy, folder: Path) -> Path:
    """Write `scaling.json`, a PNG for each law and the page; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "scaling.json", result.as_record())
    sections: list[Section] = []
    for number, law in enumerate(result.laws):
        sections += _law_sections(law, folder / f"law_{number + 1}.png")
    if result.compositions:
        rows = [["R", "exit distribution", "R2"]]
        for composed in result.compositions:
            pmf = ", ".join(f"{p:.4f}" for p in composed.exit_pmf)
            rows.append([str(composed.steps), pmf, f"{composed.r_squared:.4f}"])
        text = "The total loss predicted from the steps' losses, weighted by the mean exit "
        sections.append(
            Section("Composition", text + f"distribution. {_PAPER_COMPOSITION}", rows=rows)
        )
    path = folder / "scaling.html"
    write_text(path, page("Scaling of looped models", sections))
    return path


def _law_sections(law: FittedLaw, image: Path) -> list[Section]:
    left_out = " ".join(f"Note: {remark}." for remark in law.remarks)
    measured = (
        f"{law.fit.law.formula}. {len(law.points)} points, R2 {law.fit.r_squared(law.points):.4f}, "
        f"residual {law.fit.rmse:.4f} nats. {PAPER.get(law.name, '')} {left_out}"
    )
    rows = [["coefficient", "value", "2.5 %", "97.5 %"]]
    for name, value in law.fit.values.items():
        low, high = law.fit.intervals.get(name, (np.nan, np.nan))
        rows.append([name, *("-" if np.isnan(v) else f"{v:.4g}" for v in (value, low, high))])
    held = [["fitted to", "R2 over all points", "lowest", "fits"]]
    for hold_out in law.hold_outs:
        scores = hold_out.r_squared
        held.append(
            [hold_out.kind, f"{np.mean(scores):.4f}", f"{min(scores):.4f}", str(len(scores))]
        )
    title = law.name[0].upper() + law.name[1:]
    sections = [
        Section(title, measured, rows=rows),
        Section(f"{title}: residuals", _RESIDUALS, _draw_law(law, image)),
    ]
    if law.hold_outs:
        sections.insert(1, Section(f"{title}: hold-outs", "", rows=held))
    return sections


_RESIDUALS = (
    "Dots are measured, lines predicted; below them measured minus predicted. A pattern in the "
    "residuals is what the law does not describe."
)


def _draw_law(law: FittedLaw, path: Path) -> Path:
    points, predicted = law.points, law.fit.predict(law.points)
    size_of, steps = sizes_of(points), np.unique(points.steps)
    colors: Sequence[tuple] = depth_colors(len(steps))
    panels = {
        f"N = {short(points.parameters[size_of == size].max())}": size for size in set(size_of)
    }
    names = [*panels, *(f"{name}, residual" for name in panels)]

    def draw(axes: "Axes", name: str) -> None:
        residual = name.endswith(", residual")
        size = panels[name.removesuffix(", residual")]
        for step, color in zip(steps, colors, strict=True):
            chosen = np.flatnonzero((size_of == size) & (points.steps == step))
            chosen = chosen[np.argsort(points.tokens[chosen])]
            tokens, loss = points.tokens[chosen], points.loss[chosen]
            if residual:
                axes.plot(tokens, loss - predicted[chosen], "o", color=color, markersize=3)
                continue
            axes.plot(tokens, loss, "o", color=color, markersize=3)
            axes.plot(tokens, predicted[chosen], color=color, linewidth=1.2, label=f"R = {step:g}")
        axes.set_xscale("log")
        if residual:
            axes.axhline(0, color="0.5", linewidth=0.8)

    return draw_panels(
        names,
        draw,
        path,
        title=law.fit.law.formula,
        label="nats per token",
        columns=len(panels),
        legend=True,
    )
