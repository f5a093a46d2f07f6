"""`titan-loop analyse circuits | repair | solved RUN`, for runs of the family latent."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from titan_loop.analysis.steps.findings import Figure, Findings
from titan_loop.data.tasks.recorded_task import recorded_task
from titan_loop.errors import UserError, require_at_least
from titan_loop.evaluation.exam import ACCURACY
from titan_loop.evaluation.task_report import ReadingResult, TaskReport, graded
from titan_loop.families.latent.model import LatentDecoder
from titan_loop.inference.loading import Loaded, load_checkpoint
from titan_loop.runs.saved_run import SavedRun
from titan_loop.tables import columns

from .circuit_plots import draw_frequencies, draw_variance
from .circuits import classify_errors, find_circuits, places
from .repair import share_repaired
from .solved import share_solved
from .task import DagArithmetic, Size


def circuits(
    run: Path, *, nodes: int | None = None, samples: int = 128, graphs: int = 32, seed: int = 0
) -> Findings:
    """Find the heads that copy names and values, the form of the sums, and the sources of errors.

    Groups heads by relative variance, measures the norm amplification of the groups' OV matrices
    and the DFT of the last layer's feed-forward activations and the logits over all values of the
    operands, and counts errors by source. Writes evals/circuits-step-N.json and plots.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        nodes: Number of nodes of the graphs; by default as in training.
        samples: Number of names tried at each place of the probe's equation.
        graphs: Number of graphs whose errors are counted.
        seed: Seed of the probe's graph and names; the next seed draws the graphs of the errors.
    """
    loaded, model, task = _open(run, nodes)
    nodes = nodes or task.nodes
    if nodes < 4 or samples < 2 or graphs < 1:
        raise UserError("nodes, samples and graphs must be at least 4, 2 and 1")
    found = find_circuits(model, task, nodes=nodes, samples=samples, seed=seed)
    drawn = task.held_out_questions(graphs, Size(nodes, None), seed=seed + 1)
    errors = classify_errors(model, task, found, drawn)
    record = {"nodes": nodes, "seed": seed, **asdict(found), "errors": dict(errors)}
    figures = {
        "head-groups.png": Figure(
            "Head groups",
            "Relative variance of each head's output at the result of an equation, where one name "
            "(first layer) or one value (last layer) changes.",
            partial(draw_variance, found),
        ),
        "frequencies.png": Figure(
            "Sums in the frequency domain",
            "Mean norm of the DFT over all values of the operands, by pattern of frequencies; "
            "where all are equal (j j, j j j), it is a function of the sum.",
            partial(draw_frequencies, found),
        ),
    }
    return Findings(
        name="circuits",
        loaded=loaded,
        record=record,
        lines=[f"{100 * found.right:.1f} % of the probe's values are right"],
        figures=figures,
        tables=circuit_tables(record),
    )


def repair(
    run: Path, *, strata: tuple[str, ...] = (), questions: int = 128, seed: int = 0
) -> Findings:
    """Corrupt values computed in the previous step; count the graphs that one step repairs.

    The shares are kept with the results of the checkpoint's tasks, as the task `repair`.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        strata: Sizes of graphs, such as 16_nodes; default all of the task's.
        questions: Number of graphs of each size.
        seed: Seed of the corrupted steps and values.
    """
    loaded, model, task = _open(run, None)

    def share(name: str) -> tuple[float, int]:
        return share_repaired(model, task, name, count=questions, seed=seed), 1

    found = _shares("repair", "repaired", loaded, task, strata, questions, share)
    return replace(found, record={**found.record, "seed": seed})


def solved(run: Path, *, strata: tuple[str, ...] = (), questions: int = 128) -> Findings:
    """Count graphs of which every factor at every position is right, the paper's metric.

    Runs one step more than the deepest of the graphs of a size needs. The shares are kept with the
    results of the checkpoint's tasks, as the task `solved` and the reading `deepest`.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        strata: Sizes of graphs, such as 16_nodes; default all of the task's.
        questions: Number of graphs of each size; the paper has 1,024.
    """
    loaded, model, task = _open(run, None, discrete=False)

    def share(name: str) -> tuple[float, int]:
        return share_solved(model, task, name, count=questions)

    return _shares("solved", "solved", loaded, task, strata, questions, share, reading="deepest")


def _shares(
    name: str,
    called: str,
    loaded: Loaded,
    task: DagArithmetic,
    strata: tuple[str, ...],
    questions: int,
    share: Callable[[str], tuple[float, int]],
    reading: str = "static:1",
) -> Findings:
    """Keep the shares of graphs by stratum, each with its number of steps, as results of a task."""
    require_at_least(1, questions=questions)
    for stratum in strata:
        if stratum not in task.strata:
            raise UserError(f"strata={stratum}: {task.name} has only {', '.join(task.strata)}")
    report = TaskReport(
        step=loaded.manifest["step"],
        tokens=loaded.manifest["trainer"]["tokens"],
        trained_recurrent_steps=loaded.recurrent_steps,
        manifest_sha256=loaded.manifest["sha256"],
    )
    rows = [["graphs", called, "steps"]]
    for stratum in strata or task.strata:
        found, steps = share(stratum)
        metrics = graded(ACCURACY, found, questions)
        result = ReadingResult(metrics=metrics, mean_steps=steps)
        report.tasks[f"{name}/{stratum}"] = {reading: result}
        rows.append([stratum, f"{found:.3f}", str(steps)])
    saved = report.save(loaded.run.directory)
    record = {"questions": questions, called: {row[0]: row[1] for row in rows[1:]}}
    return Findings(name=name, loaded=loaded, record=record, lines=[*columns(rows), str(saved)])


def _open(
    run: Path, nodes: int | None, *, discrete: bool = True
) -> tuple[Loaded, LatentDecoder, DagArithmetic]:
    """Return a latent-space model with room for the task's largest graphs, and its task.

    Args:
        discrete: Whether the model's states must be discrete.
    """
    task = recorded_task(SavedRun.open(run).checkpoint().manifest["data"])
    if not isinstance(task, DagArithmetic):
        raise UserError(f"{run} was not trained on {DagArithmetic.name}, as this analysis needs")
    if nodes is not None and not task.leaves <= nodes < task.names:
        raise UserError(
            f"nodes={nodes} must be from {task.leaves}, the leaves, to {task.names - 1}, one less "
            "than the names"
        )
    largest = task.positions(max(task.nodes, nodes or 0, *task.test_nodes) + 1)
    loaded = load_checkpoint(run, use="analyse", context_tokens=largest)
    if not isinstance(loaded.model, LatentDecoder) or discrete > loaded.model.discrete:
        kind = "discrete model" if discrete else "model"
        raise UserError(f"{run} is not a {kind} of the family latent, as this analysis needs")
    return loaded, loaded.model, task


def circuit_tables(record: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return title → rows, the header first; a table without rows is left out.

    Args:
        record: Fields of `Circuits` and `errors`, as `evals/circuits-step-N.json` has them.
    """
    named = places(len(record["value_groups"]))
    heads = [["heads that belong to", *named]]
    for name in ("name", "value"):
        groups = [" ".join(map(str, group)) or "-" for group in record[f"{name}_groups"]]
        heads.append([f"{name}s", *groups, *[""] * (len(named) - len(groups))])
    gains = [["norm amplification", *next(iter(record["amplification"].values()), {})]]
    for group, factors in record["amplification"].items():
        gains.append([group, *(f"{value:.2f}" for value in factors.values())])
    norms = [["mean norm of the DFT", *next(iter(record["frequencies"].values()))]]
    for site, patterns in record["frequencies"].items():
        norms.append([site, *(f"{value:.3g}" for value in patterns.values())])
    errors = [["equations", *record["errors"]], ["count", *map(str, record["errors"].values())]]
    tables = {
        "Heads by the change they respond to": heads,
        "Norm amplification by head group": gains,
        "Frequencies of the last layer": norms,
        "Errors by their source": errors,
    }
    return {title: rows for title, rows in tables.items() if len(rows) > 1}
