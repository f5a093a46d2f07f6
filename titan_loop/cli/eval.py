"""`titan-loop eval`: held-out text and tasks by depth or exit policy; a watcher of checkpoints."""

import logging
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from titan_loop.cli.arguments import command
from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation.task_options import TaskOptions


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
        ema: Score the average of the weights that --ema.decay kept in training; its reports are
            saved beside the reports of the weights and appear in no plot.
        beats_unigram: Share, such as 0.2, by which held-out bits per byte at the trained R must be
            below the unigram model's; otherwise the exit code is 1.
        beats_bigram: Share for the bigram model.
    """
    baselines = not (evaluation.tasks or frontier)
    asked = {"unigram": beats_unigram, "bigram": beats_bigram}
    gains = {baseline: share for baseline, share in asked.items() if share is not None}
    for baseline, share in gains.items():
        if not 0 < share < 1:
            raise UserError(f"eval: --beats-{baseline} {share} must lie between 0 and 1")
        if not baselines:
            raise UserError(
                f"eval: --beats-{baseline} needs held-out text: leave out --tasks and --frontier"
            )
    if frontier and ema:
        raise UserError("eval: --frontier draws the weights of training; leave out --ema")

    from titan_loop.analysis.evaluation_tables import reading_table, task_table
    from titan_loop.analysis.frontier import frontier_table, write_frontier
    from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
    from titan_loop.evaluation.share_work import join_ranks
    from titan_loop.runs.recipe_folder import chosen_run
    from titan_loop.runs.saved_run import SavedRun

    _quiet_logs()
    path = chosen_run(run, stage)
    report = evaluate_tasks(path, evaluation, frontier=frontier, baselines=baselines, ema=ema)
    if join_ranks()[0] == 0:
        done = SavedRun.open(path).directory
        if baselines:
            print(reading_table(report))
        elif not frontier:
            print(task_table(report, {task.name: task.metric for task in evaluation.suite_tasks()}))
        elif png := write_frontier(report, done):
            print(frontier_table(report))
            print(f"The frontier is in {png}")
        page = f"titan-loop report {quote(str(done.path))} makes a page"
        print(f"The numbers are in {report.path(done)}; {page}")
    if report.failures:
        names = ", ".join(report.failures)
        raise RunFailedError(f"tasks without a result: {names} (why: above)")
    if gains:
        from titan_loop.evaluation.ngram_baselines import require_gain

        for baseline, share in gains.items():
            require_gain(report, baseline, share)


def watch(
    run: Path, evaluation: TaskOptions, *, once: bool = False, interval: float = 60.0
) -> None:
    """Evaluate every checkpoint of a run once, as it appears, until the run is complete.

    Several watchers of one run share the work; any of them may be killed and started again.

    Args:
        run: Run directory; it need not exist yet.
        evaluation: Depths, tasks and settings.
        once: Stop when nothing is left to evaluate.
        interval: Seconds between two looks for new checkpoints.
    """
    from titan_loop.evaluation.watch import Watcher

    _quiet_logs()
    watcher = Watcher(run, evaluation)
    watcher.run(once=once, interval_seconds=interval)
    if watcher.incomplete:
        steps = ", ".join(map(str, watcher.incomplete))
        raise RunFailedError(f"{run}: steps {steps} lack results (why: above)")


def _quiet_logs() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for name in ("datasets", "huggingface_hub", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
