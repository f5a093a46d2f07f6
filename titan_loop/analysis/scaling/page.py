"""The files of a scaling study: `scaling.json`, and `scaling.html` with fits and residuals."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan_loop.analysis.drawing import Axes, depth_colors, draw_axes, draw_panels
from titan_loop.analysis.page import Section, page
from titan_loop.analysis.scaling.law import Losses
from titan_loop.analysis.scaling.study import FittedLaw, ScalingStudy, sizes_of
from titan_loop.storage.json_files import write_json, write_text
from titan_loop.tables import short

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
    "worth of a step, linear": "Published held-out errors: R 0.2566, N 0.1106, D 0.0882.",
    "worth of a step, power": (
        "Published phi: 0.46 (arXiv 2604.21106); held-out errors: R 0.0313, N 0.0211, D 0.0073."
    ),
    "worth of a step, bounded": (
        "Published kappa1 0.368, kappa2 1.40; held-out errors: R 0.0092, N 0.0128, D 0.0049."
    ),
}
"""Published figures beside each fit: arXiv 2510.25741, Appendices D and E, and 2609.40316."""

_PAPER_COMPOSITION = "Ouro, R = 4, exit distribution measured on MMLU: R2 0.961."


def write_study(result: ScalingStudy, folder: Path, *, source: str) -> Path:
    """Write `scaling.json`, a PNG for each law and the page; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "scaling.json", result.as_record(source))
    sections: list[Section] = []
    for law in result.laws:
        if law.chosen:
            sections += _choice_sections(result, law, folder)
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


def _choice_sections(result: ScalingStudy, chosen: FittedLaw, folder: Path) -> list[Section]:
    forms = [law for law in result.laws if law.name.startswith("worth of a step")]
    kinds = [hold_out.kind for hold_out in chosen.hold_outs]
    rows = [["form", "coefficients", *kinds, "all"]]
    for law in forms:
        errors = {each.kind: f"{np.mean(each.rmse):.4f}" for each in law.hold_outs}
        name, size = law.fit.law.name + " (chosen)" * law.chosen, len(law.fit.law.coefficients)
        held_out = [errors.get(kind, "-") for kind in kinds]
        rows.append([name, str(size), *held_out, f"{law.held_out_error:.4f}"])
    text = "Root mean square error in nats on points that a fit did not see, by the fitted part."
    return [
        Section("Which form predicts best", text, rows=rows),
        Section("Predicted against measured", "", _draw_measured(chosen, folder / "measured.png")),
        Section("Equal training FLOPs", _ISO_FLOP, _draw_iso_flop(chosen, folder / "iso_flop.png")),
    ]


_ISO_FLOP = (
    "The chosen law at three training budgets, against the number of parameters. Training costs 6 "
    "FLOPs per token and visited parameter, so more steps leave fewer tokens. Dots are measured "
    "within 20 % of the budget."
)
_NEAR = np.log(1.2)  # the 20 % of the text above


def _draw_measured(law: FittedLaw, path: Path) -> Path:
    points, predicted = law.points, law.fit.predict(law.points)
    steps = np.unique(points.steps)

    def draw(axes: Axes) -> None:
        for step, color in zip(steps, depth_colors(len(steps)), strict=True):
            chosen = points.steps == step
            style = {"color": color, "markersize": 3, "label": f"R = {step:g}"}
            axes.plot(predicted[chosen], points.loss[chosen], "o", **style)
        ends = [points.loss.min(), points.loss.max()]
        axes.plot(ends, ends, color="0.5", linewidth=0.8)
        axes.set_xlabel("predicted, nats per token")
        axes.set_ylabel("measured, nats per token")

    title = f"The {law.fit.law.name} form misses its points by {law.fit.rmse:.4f} nats per token"
    return draw_axes(draw, path, title=title)


def _draw_iso_flop(law: FittedLaw, path: Path) -> Path:
    points = law.points
    steps = np.unique(points.steps)
    share = float(np.mean(points.looped / points.parameters))
    spent = 6 * (points.parameters + points.looped * (points.steps - 1)) * points.tokens
    budgets = {f"{flops:.1e} FLOPs": flops for flops in np.quantile(spent, (0.5, 0.75, 1.0))}
    sizes = np.geomspace(points.parameters.min(), points.parameters.max(), 40)

    def draw(axes: Axes, name: str) -> None:
        for step, color in zip(steps, depth_colors(len(steps)), strict=True):
            tokens = budgets[name] / (6 * sizes * (1 + share * (step - 1)))
            at = Losses.unmeasured(
                parameters=sizes, looped=share * sizes, tokens=tokens, steps=step
            )
            axes.plot(sizes, law.fit.predict(at), color=color, label=f"R = {step:g}")
            near = (points.steps == step) & (np.abs(np.log(spent / budgets[name])) < _NEAR)
            axes.plot(points.parameters[near], points.loss[near], "o", color=color, markersize=3)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(sizes[::13], [short(size) for size in sizes[::13]])
        axes.set_xlabel("parameters")

    title = f"By {law.fit.law.formula}, at equal training FLOPs"
    return draw_panels(list(budgets), draw, path, title=title, label="nats per token")


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
    held = [["fitted to", "held-out error, nats", "R2 over all points", "lowest R2", "fits"]]
    for hold_out in law.hold_outs:
        scores = hold_out.r_squared
        means = (f"{np.mean(values):.4f}" for values in (hold_out.rmse, scores))
        held.append([hold_out.kind, *means, f"{min(scores):.4f}", str(len(scores))])
    title = law.name[0].upper() + law.name[1:]
    sections = [Section(title, measured, rows=rows)]
    if law.hold_outs:
        sections.append(Section(f"{title}: hold-outs", "", rows=held))
    return [*sections, Section(f"{title}: residuals", _RESIDUALS, _draw_law(law, image))]


_RESIDUALS = (
    "Dots are measured, lines predicted; below them measured minus predicted. A pattern in the "
    "residuals shows that the law misses something."
)


def _draw_law(law: FittedLaw, path: Path) -> Path:
    points, predicted = law.points, law.fit.predict(law.points)
    size_of, steps = sizes_of(points), np.unique(points.steps)
    colors: Sequence[tuple] = depth_colors(len(steps))
    panels = {
        f"N = {short(points.parameters[size_of == size].max())}": size for size in set(size_of)
    }
    names = [*panels, *(f"{name}, residual" for name in panels)]

    def draw(axes: Axes, name: str) -> None:
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
        axes.set_xlabel("tokens")

    title, label = f"{law.fit.law.formula}: {law.fit.rmse:.4f} nats off", "nats per token"
    return draw_panels(names, draw, path, title=title, label=label, columns=len(panels))
