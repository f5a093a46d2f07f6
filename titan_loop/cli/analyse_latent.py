"""`titan-loop analyse circuits | repair RUN`: inside a model that reasons in a latent space."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.errors import UserError

if TYPE_CHECKING:
    from titan_loop.data.tasks.dag_arithmetic import DagArithmetic
    from titan_loop.inference.loading import Loaded


def circuits(
    run: Path, *, nodes: int | None = None, samples: int = 128, graphs: int = 32, seed: int = 0
) -> None:
    """Show which heads copy names and values, how sums are computed, and what goes wrong.

    Head groups by relative variance, norm amplification of their OV matrices, the DFT of the last
    layer's feed-forward activations over all values of the operands, and errors by their source.
    Writes evals/circuits-step-N.json and plots.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        nodes: Nodes of the graphs; default that of training.
        samples: Number of names that an operand is changed to.
        graphs: Number of graphs whose errors are counted.
        seed: Chooses the graph of the probe, and the names.
    """
    from titan_loop.analysis.latent_circuits import classify_errors, find_circuits
    from titan_loop.analysis.latent_plots import draw_frequencies, draw_variance
    from titan_loop.analysis.latent_tables import circuit_tables
    from titan_loop.data.tasks.dag_arithmetic import Size
    from titan_loop.evaluation.analysed_run import save_analysis
    from titan_loop.tables import columns

    loaded, task = _open(run, nodes)
    nodes = nodes or task.nodes
    if nodes < 4 or samples < 2 or graphs < 1:
        raise UserError("nodes, samples and graphs must be at least 4, 2 and 1")
    found = find_circuits(loaded.model, task, nodes=nodes, samples=samples, seed=seed)  # type: ignore[arg-type]
    drawn = task.held_out_questions(graphs, Size(nodes, None), seed=seed + 1)
    errors = classify_errors(loaded.model, task, found, drawn)  # type: ignore[arg-type]
    record = {"nodes": nodes, "seed": seed, **asdict(found), "errors": dict(errors)}
    for rows in circuit_tables(record).values():
        print("\n".join(columns(rows)) + "\n")
    print(f"of all values of the probe {100 * found.right:.1f} % are right")
    print(save_analysis(loaded, "circuits", record))
    plots = loaded.run.directory.plots
    print(draw_variance(found, plots / "head-groups.png"))
    print(draw_frequencies(found, plots / "frequencies.png"))


def repair(run: Path, *, strata: tuple[str, ...] = (), questions: int = 128, seed: int = 0) -> None:
    """Corrupt values that were worked out in the step before; count graphs repaired in one step.

    The shares are kept with the results of the checkpoint's tasks, as the task repair.

    Args:
        run: Run of the family latent, or its checkpoints/step-N.
        strata: Sizes of graphs, such as 16_nodes; default all of the task's.
        questions: Number of graphs of each size.
        seed: Chooses steps and values.
    """
    from titan_loop.evaluation.repair import share_repaired
    from titan_loop.evaluation.task_report import ReadingResult, TaskReport
    from titan_loop.tables import columns

    if questions < 1:
        raise UserError(f"questions={questions} must be at least 1")
    loaded, task = _open(run, None)
    for name in strata:
        if name not in task.strata:
            raise UserError(f"strata={name}: {task.name} has only {', '.join(task.strata)}")
    report = TaskReport(
        step=loaded.manifest["step"],
        tokens=loaded.manifest["trainer"]["tokens"],
        trained_recurrent_steps=loaded.recurrent_steps,
        manifest_sha256=loaded.manifest["sha256"],
    )
    rows = [["repaired in one step", "share"]]
    for name in strata or task.strata:
        share = share_repaired(loaded.model, task, name, count=questions, seed=seed)  # type: ignore[arg-type]
        result = ReadingResult(metrics={"acc,none": share}, mean_steps=1.0)
        report.tasks[f"repair/{name}"] = {"static:1": result}
        rows.append([name, f"{share:.3f}"])
    print("\n".join(columns(rows)))
    print(report.save(loaded.run.directory))


def _open(run: Path, nodes: int | None) -> tuple["Loaded", "DagArithmetic"]:
    """Return a latent-space model with room for the task's largest graphs, and its task."""
    from titan_loop.data.tasks.dag_arithmetic import DagArithmetic
    from titan_loop.data.tasks.registry import recorded_task
    from titan_loop.inference.loading import load_checkpoint
    from titan_loop.models.families.latent import LatentDecoder
    from titan_loop.runs.saved_run import SavedRun

    task = recorded_task(SavedRun.open(run).checkpoint().manifest["data"])
    if not isinstance(task, DagArithmetic):
        raise UserError(f"{run} was not trained on {DagArithmetic.name}; this analysis is of that")
    if nodes is not None and not task.leaves <= nodes < task.names:
        raise UserError(
            f"nodes={nodes} must be from {task.leaves}, the leaves, to {task.names - 1}, less "
            "than names"
        )
    largest = task.positions(max(task.nodes, nodes or 0, *task.test_nodes) + 1)
    loaded = load_checkpoint(run, use="analyse", context_tokens=largest)
    if not isinstance(loaded.model, LatentDecoder) or not loaded.model.discrete:
        raise UserError(f"{run} is no discrete model of the family latent; this analysis is of one")
    return loaded, task


VERBS = {"circuits": circuits, "repair": repair}
