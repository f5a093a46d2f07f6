"""A run's report as one HTML page that needs no network, no scripts and no files beside it.

Sections without data are left out; the end of the page has the commands that would add them.
"""

import base64
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import titan_loop
from titan_loop.analysis.depth_plots import plot_depths, swept_tasks
from titan_loop.analysis.evaluation_tables import task_rows
from titan_loop.analysis.frontier import frontier_points, write_frontier
from titan_loop.analysis.plots import charts, plot_held_out
from titan_loop.analysis.recipe_plot import StageCurve, plot_recipe
from titan_loop.analysis.results import total_flops
from titan_loop.errors import UserError
from titan_loop.evaluation.evals_log import held_out_while_training
from titan_loop.evaluation.exam import model_sizes
from titan_loop.evaluation.ngram_baselines import BASELINES
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.models.family import build_decoder
from titan_loop.runs.decisions import decision_rows
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import read_json_object, write_text

REPORT_NAME = "report.html"


class Section(NamedTuple):
    """A part of the page: a heading, a sentence, and an image or a table, header first."""

    title: str
    text: str
    image: Path | None = None
    rows: Sequence[Sequence[str]] = ()

    def data(self) -> str:
        """Return the image in base 64."""
        assert self.image is not None
        return base64.b64encode(self.image.read_bytes()).decode()


def write_report(run_directory: RunDirectory) -> Path:
    """Draw everything a run has data for and write `report.html`; return its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    run_directory.read_run()
    records = _records(run_directory)
    missing: list[str] = []
    sections = [
        _summary(run_directory, records),
        *_training(run_directory, records),
        *_decisions(run_directory),
        *_evaluations(run_directory, missing),
        *_analyses(run_directory),
        *_lineage(run_directory),
    ]
    path = run_directory.path / REPORT_NAME
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(
        f"{REPORT_NAME}.j2"
    )
    name, version = run_directory.path.resolve().name, titan_loop.__version__
    write_text(
        path, template.render(name=name, sections=sections, missing=missing, version=version)
    )
    return path


def plot_run(run_directory: RunDirectory) -> list[Path]:
    """Draw the plots of training and of depths into `plots/` and return the paths."""
    sections = _training(run_directory, _records(run_directory))
    sections += _depths(run_directory, TaskReport.all_of(run_directory))
    return [section.image for section in sections if section.image is not None]


def _records(run_directory: RunDirectory) -> list[dict[str, Any]]:
    records = run_directory.read_metrics()
    if not records and not any(run_directory.evaluations.glob("*-step-*.json")):
        raise UserError(f"{str(run_directory.metrics_jsonl)!r} has no records; train the run first")
    return records


def _summary(run_directory: RunDirectory, records: Sequence[dict[str, Any]]) -> Section:
    run, saved = run_directory.read_run(), SavedRun(run_directory.path)
    versions: dict[str, dict[str, None]] = {}  # of every start, without repetitions
    for start in (run, *run.get("restarts", [])):
        for name, version in start.get("versions", {}).items():
            versions.setdefault(name, {})[version] = None
    options = saved.model_options
    model = build_decoder(options, max_seq_len=saved.seq_len, device="meta")
    (parameters, inner), config = model_sizes(model), model.config
    rows = [
        ["", ""],
        ["model", f"{options.size}, family {options.family}"],
        ["parameters", f"{parameters:,}, of them {inner:,} without embedding and head"],
        ["layers", f"{len(config.layers)} of width {config.dim}, vocabulary {config.vocab_size:,}"],
    ]
    for last in records[-1:]:  # imported and merged models have none
        share = last["tokens"] / saved.total_tokens
        rows += [
            ["recurrent steps", f"{last['recurrent_steps']} now"],
            ["tokens", f"{last['tokens']:,} of {saved.total_tokens:,} ({share:.0%})"],
            ["training steps", f"{last['step']:,}"],
            *([["learning rate", f"{last['lr']:.3g} now"]] if "lr" in last else []),
            *([["training FLOPs", f"{flops:.3g}"]] if (flops := total_flops(records)) else []),
            ["loss", "not finite" if last["loss"] is None else f"{last['loss']:.4f}"],
        ]
    rows += [
        ["data", ", ".join(saved.mixture) or "generated, or none"],
        ["window", f"{saved.seq_len:,} tokens"],
        ["started", f"{run['created']}, restarted {len(run.get('restarts', []))} times"],
        ["versions", ", ".join(f"{name} {' then '.join(v)}" for name, v in versions.items())],
    ]
    return Section("Summary", "", rows=rows)


def _training(run_directory: RunDirectory, records: Sequence[dict[str, Any]]) -> list[Section]:
    plots = run_directory.plots
    sections = [
        Section(chart.title, chart.text, chart.draw(records, plots / f"{name}.png"))
        for name, chart in charts(records).items()
    ]
    if held_out := held_out_while_training(run_directory):
        text = "Bits per byte of every source, on the same windows each time."
        image = plot_held_out(held_out, plots / "held_out.png")
        sections.append(Section("Held-out text while training", text, image))
    return sections


def _decisions(run_directory: RunDirectory) -> list[Section]:
    decisions = run_directory.read_decisions()
    if not decisions:
        return []
    text = "Every step whose update was skipped, and every rewind to an older checkpoint."
    return [Section("Spikes", text, rows=decision_rows(decisions))]


def _depths(run_directory: RunDirectory, reports: Sequence[TaskReport]) -> list[Section]:
    swept = [report for report in reports if swept_tasks(report)]
    if not swept:
        return []
    text = (
        f"At step {swept[-1].step:,}, every depth from the same pass. Bars are 95 % intervals, on "
        "held-out text of the difference from the first depth, paired over the same documents; "
        "grey marks the trained R; deeper readings extrapolate."
    )
    image = plot_depths(swept[-1], run_directory.plots / "depths.png")
    return [Section("Depth sweep", text, image)]


def _evaluations(run_directory: RunDirectory, missing: list[str]) -> list[Section]:
    name, saved = quote(str(run_directory.path)), SavedRun(run_directory.path)
    generated = saved.generated_task()
    own = "held_out" if generated is None else generated.name
    reports = TaskReport.all_of(run_directory)
    sections = _depths(run_directory, reports)
    if saved.mixture and not sections:
        missing.append(f"a depth sweep: titan-loop eval {name}")
    frontiers = [report for report in reports if frontier_points(report)]
    if frontiers:
        text = "Every exit policy at many settings beside static depth, at step "
        image = write_frontier(frontiers[-1], run_directory)
        sections.append(Section("Quality against compute", f"{text}{frontiers[-1].step:,}.", image))
    else:
        missing.append(f"a frontier: titan-loop eval {name} --tasks {own} --frontier")
    if reports:
        sections.append(_task_table(reports[-1]))
    return sections


def _analyses(run_directory: RunDirectory) -> list[Section]:
    """Return the plots and tables that `titan-loop analyse` left, each from its newest record."""
    newest: dict[str, dict[str, Any]] = {}
    for path in run_directory.evaluations.glob("*-step-*.json"):
        record = read_json_object(path, fix="analyse the run again")
        name = path.name.partition("-step-")[0]
        if "figures" in record and record["step"] >= newest.get(name, record)["step"]:
            newest[name] = record
    sections, plots = [], run_directory.plots
    for _, record in sorted(newest.items()):
        for name, (title, text) in record["figures"].items():
            if (plots / name).is_file():
                sections.append(Section(title, text, plots / name))
        text = f"At step {record['step']:,}."
        sections += [Section(title, text, rows=rows) for title, rows in record["tables"].items()]
    return sections


def _task_table(report: TaskReport) -> Section:
    readings = dict.fromkeys(
        name
        for results in report.tasks.values()
        for name in results
        if name.startswith("static:") or name in BASELINES or len(results) == 1
    )
    lacking = {**report.skipped, **report.failures}
    reasons = "; ".join(f"{task}: {reason}" for task, reason in lacking.items())
    asked: dict[str, dict[str, None]] = {}
    for task, results in report.tasks.items():
        for reading in filter(results.__contains__, readings):  # a set has another order each time
            asked.setdefault(results[reading].settings or "the run's settings", {})[task] = None
    samples = "; ".join(f"{', '.join(tasks)}: {settings}" for settings, tasks in asked.items())
    text = f"At step {report.step:,}. Asked with: {samples}."
    text += f" Without result: {reasons}." if reasons else ""
    return Section("Tasks", text, rows=task_rows(report, list(readings)))


def _lineage(run_directory: RunDirectory) -> list[Section]:
    lineage = SavedRun(run_directory.path).lineage()
    if not lineage:
        return []
    rows = [["run", "stage", "checkpoint", "tokens", "R", "saved", "recipe"]]
    curves: list[StageCurve] = []
    start = 0
    for ancestor in lineage:
        manifest = ancestor.manifest
        name = ancestor.run.resolve().name
        if manifest is None:
            rows.append([name, ancestor.stage, ancestor.checkpoint.name, "gone", "", "", ""])
            continue
        trainer = manifest["trainer"]
        made = [f" ({n})" for n in ("upcycled", "merged") if n in manifest["lineage"]]
        row = [name, ancestor.stage + "".join(made), ancestor.checkpoint.name]
        row += [f"{trainer['tokens']:,}", str(trainer["recurrent_steps"])]
        row += [str(manifest.get("created", ""))]
        rows.append([*row, str(manifest["lineage"].get("recipe_sha256", ""))[:12]])
        records = RunDirectory(ancestor.run).read_metrics()
        if ancestor is not lineage[-1]:  # which may have gone on after its child had begun
            records = [record for record in records if record["step"] <= manifest["step"]]
        if records:
            curves.append(StageCurve(ancestor.stage or name, start, records))
        start += trainer["tokens"]
    text = "The runs this one descends from, oldest first, each with the checkpoint that the next "
    sections = [Section("Lineage", f"{text}one started from.", rows=rows)]
    if len(curves) > 1:
        text = "Cross entropy after the last recurrent step along the whole chain."
        image = plot_recipe([curves], run_directory.plots / "stages.png")
        sections.append(Section("Stage boundaries", text, image))
    return sections
