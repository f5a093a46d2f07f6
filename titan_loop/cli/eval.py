"""`titan-loop eval`: held-out text and tasks by depth or exit policy; a watcher of checkpoints."""

import logging
from collections.abc import Sequence
from pathlib import Path

from titan_loop.cli.arguments import command
from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation.task_options import TaskOptions

DEPTHS = (1, 2, 3, 4, 5, 6)


def run(arguments: Sequence[str]) -> int:
    """Evaluate one checkpoint, or watch a run."""
    if arguments[:1] == ["watch"]:
        return command("eval watch")(watch)(arguments[1:])
    return command("eval")(evaluate)(arguments)


def evaluate(
    run: Path,
    evaluation: TaskOptions,
    *,
    stage: str | None = None,
    frontier: bool = False,
    dense: Path | None = None,
    ema: bool = False,
    beats_unigram: float | None = None,
    beats_bigram: float | None = None,
) -> None:
    """Score a checkpoint.

    Without --tasks: bits per byte of held-out text at several depths, beside a unigram and a bigram
    model of its training tokens. `eval watch RUN` evaluates every new checkpoint of a run.

    Args:
        run: Run directory, a recipe's folder (its newest stage is taken), or a checkpoint;
            RUN/checkpoints/best is the one that train --best keeps.
        evaluation: Depths, tasks and settings.
        stage: Stage to take instead, if a recipe's folder is given.
        frontier: Score every depth, and every exit policy at many settings.
        dense: Dense run to draw beside the frontier: of equal FLOPs, evaluated with these flags.
        ema: Score the average of the weights that --ema.decay kept in training; its reports are
            saved beside the reports of the weights and appear in no plot.
        beats_unigram: Share, such as 0.2, by which held-out bits per byte at the trained R must be
            below the unigram model's; otherwise the exit code is 1.
        beats_bigram: Share for the bigram model.
    """
    asked = {"unigram": beats_unigram, "bigram": beats_bigram}
    gains = {baseline: share for baseline, share in asked.items() if share is not None}
    for baseline, share in gains.items():
        if not 0 < share < 1:
            raise UserError(f"eval: --beats-{baseline} {share} must lie between 0 and 1")
    if dense is not None and not frontier:
        raise UserError(f"eval: --dense {dense} needs --frontier, which draws it")
    asks_tasks = bool(evaluation.tasks) or frontier
    if not asks_tasks:
        evaluation.refuse_flags_of_tasks()
    for baseline in gains if asks_tasks else ():
        raise UserError(
            f"eval: --beats-{baseline} needs held-out text: leave out --tasks and --frontier"
        )
    if frontier and ema:
        raise UserError("eval: --frontier draws the weights of training; leave out --ema")

    from titan_loop.runs.recipe_folder import chosen_run

    _quiet_logs()
    path = chosen_run(run, stage)
    if asks_tasks:
        _tasks(path, evaluation, frontier=frontier, dense=dense, ema=ema)
        return

    from titan_loop.analysis.evaluation_tables import depth_table
    from titan_loop.evaluation.depth_report import require_gain
    from titan_loop.evaluation.evaluate_run import evaluate_run
    from titan_loop.evaluation.share_work import join_ranks
    from titan_loop.runs.saved_run import SavedRun

    report = evaluate_run(
        path,
        depths=evaluation.depths or DEPTHS,
        windows=evaluation.windows,
        sources=evaluation.sources,
        seq_len=evaluation.seq_len,
        ema=ema,
    )
    if join_ranks()[0] == 0:
        print(depth_table(report))
        done = SavedRun.open(path).directory
        print(f"The numbers are in {done.evaluations}; titan-loop report {done.path} makes a page")
    for baseline, share in gains.items():
        require_gain(report, share, baseline=baseline)


def _tasks(
    run: Path, options: TaskOptions, *, frontier: bool, dense: Path | None, ema: bool
) -> None:
    from titan_loop.analysis.evaluation_tables import task_table
    from titan_loop.analysis.frontier import dense_reports, frontier_table, write_frontier
    from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
    from titan_loop.evaluation.share_work import join_ranks
    from titan_loop.runs.saved_run import SavedRun

    if dense is not None:
        dense_reports(dense)  # refuses a wrong one before work starts
    report = evaluate_tasks(run, options, frontier=frontier, ema=ema)
    if join_ranks()[0] == 0:
        run_directory = SavedRun.open(run).directory
        if frontier:
            if written := write_frontier(report, run_directory, dense):
                print(frontier_table(written.points))
                print(f"The frontier is in {written.csv} and {written.png}")
        else:
            print(task_table(report, {task.name: task.metric for task in options.suite_tasks()}))
        print(f"The report is {report.path(run_directory)}")
    if report.failures:
        names = ", ".join(report.failures)
        raise RunFailedError(f"{len(report.failures)} tasks have no result: {names} (why: above)")


def watch(
    run: Path,
    evaluation: TaskOptions,
    *,
    once: bool = False,
    interval: float = 60.0,
    wandb: bool = False,
    retry: bool = False,
) -> None:
    """Evaluate every checkpoint of a run once, as it appears, until the run is complete.

    Several watchers of one run share the work; any of them may be killed and started again.

    Args:
        run: Run directory; it need not exist yet.
        evaluation: Depths, tasks and settings.
        once: Stop when nothing is left to evaluate.
        interval: Seconds between two looks for new checkpoints.
        wandb: Also log to the W&B run of the training.
        retry: Also evaluate again the checkpoints on which a task failed before.
    """
    from titan_loop.evaluation.watch import Watcher

    _quiet_logs()
    watcher = Watcher(run, evaluation, wandb=wandb, retry=retry)
    watcher.run(once=once, interval_seconds=interval)
    if watcher.incomplete:
        steps = ", ".join(str(step) for step in watcher.incomplete)
        raise RunFailedError(f"{run}: steps {steps} lack results (why: above)")


def _quiet_logs() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for name in ("datasets", "huggingface_hub", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
