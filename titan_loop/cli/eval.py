"""`titan-loop eval`: bits per byte by depth, tasks under every reading, the checkpoint watcher."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from titan_loop.cli.arguments import command
from titan_loop.errors import RunFailedError, UserError

if TYPE_CHECKING:
    from titan_loop.evaluation.evaluate_tasks import TaskOptions

DEPTHS = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Depths, tasks and settings of a scoring.

    Attributes:
        depths: Recurrent steps to score, all in one pass; by default 1 to 6 for held-out text.
        windows: Held-out windows per source, always the same ones.
        sources: Sources to score: names of the run's, or folders of others; by default all of the
            run's.
        seq_len: Tokens of a held-out window; by default as in training.
        tasks: Tasks of lm-evaluation-harness, or suites (ouro_base, depth, offline), separated by
            commas.
        num_fewshot: Number of examples, instead of each task's own.
        limit: Documents per task, for a first look.
        recurrent_steps: Number of recurrent steps R; by default the trained one.
        exit: Exit policy: full, static:S, hidden:EPSILON, fixed_point:EPSILON, margin:EPSILON,
            confidence:P, q:THRESHOLD, kl:KL,NATS or contrast:STEP,STRENGTH,SHARE.
        kv_cache: Key-value cache of generated tokens.
        prefill_steps: Number of recurrent steps of prompts that tokens are generated from.
        batch_size: Rows at a time.
        max_length: Context in tokens; by default the trained window.
        dtype: Type of the weights.
        tokenizer: A tokenizer.json; by default the source's.
        include_path: Folder of your own harness tasks.
        confirm_run_unsafe_code: Run, without a sandbox, the programs that the model writes in code
            tasks.
        no_cache: Score every request again.
    """

    depths: tuple[int, ...] = ()
    windows: int = 64
    sources: tuple[str, ...] = ()
    seq_len: int | None = None
    tasks: UseAppendAction[tuple[str, ...]] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    recurrent_steps: int | None = None
    exit: str = "full"
    kv_cache: str = "full"
    prefill_steps: int | None = None
    batch_size: int = 8
    max_length: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    tokenizer: str | None = None
    include_path: Path | None = None
    confirm_run_unsafe_code: bool = False
    no_cache: bool = False

    def options(self, *, frontier: bool = False, ema: bool = False) -> "TaskOptions":
        """Return the options of an evaluation of the tasks; held-out text if there are none."""
        from titan_loop.evaluation.evaluate_tasks import TaskOptions
        from titan_loop.evaluation.suites import DEPTH_SUITE_STEPS, expand_tasks

        words = (word.strip() for text in self.tasks or ("held_out",) for word in text.split(","))
        tasks = [word for word in words if word]
        says_how = frontier or self.exit != "full" or self.recurrent_steps is not None
        own = ("tasks", "num_fewshot", "depths", "no_cache")
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return TaskOptions(
            tasks=expand_tasks(tasks, self.num_fewshot),
            depths=self.depths or (DEPTH_SUITE_STEPS if "depth" in tasks and not says_how else ()),
            frontier=frontier,
            cache=not self.no_cache,
            ema=ema,
            **same,
        )

    def refuse_flags_of_tasks(self) -> None:
        """Raise `UserError` for flags that change nothing in held-out text by depth."""
        for field in fields(self):
            value = getattr(self, field.name)
            own = field.name in ("depths", "windows", "sources", "seq_len")
            if not own and value != field.default:
                flag = f"--{field.name.replace('_', '-')}{'' if value is True else f' {value}'}"
                raise UserError(
                    f"eval: {flag} needs --tasks; without them, held-out text is scored at the "
                    "--depths"
                )


def run(arguments: Sequence[str]) -> int:
    """Evaluate one checkpoint, or watch a run."""
    if arguments[:1] == ["watch"]:
        return command("eval watch")(watch)(arguments[1:])
    return command("eval")(evaluate)(arguments)


def evaluate(
    run: Path,
    scoring: Scoring,
    *,
    stage: str | None = None,
    frontier: bool = False,
    dense: Path | None = None,
    ema: bool = False,
    beats_unigram: float | None = None,
    beats_bigram: float | None = None,
) -> None:
    """Score a checkpoint.

    Without --tasks: held-out text at several depths, beside a unigram and a bigram model fitted on
    the tokens it has read. `eval watch RUN` evaluates every new checkpoint of a run.

    Args:
        run: Run directory, or a recipe's folder for its newest stage; or a checkpoint, of which
            RUN/checkpoints/best is the one that train --best keeps.
        scoring: Depths, tasks and settings.
        stage: Stage of that recipe.
        frontier: Score every depth, and every exit policy at many settings.
        dense: Run of a dense model of as many FLOPs, evaluated with the same flags, whose quality
            is drawn beside the frontier.
        ema: Score the average of the weights that --ema.decay kept in training; its reports stand
            beside the reports of the weights and appear in no plot.
        beats_unigram: Fail unless held-out bits per byte are this share below the unigram model's.
        beats_bigram: Fail unless they are this share below the bigram model's.
    """
    gains = {"unigram": beats_unigram, "bigram": beats_bigram}
    gains = {baseline: share for baseline, share in gains.items() if share is not None}
    for baseline, share in gains.items():
        if not 0 < share < 1:
            raise UserError(f"eval: --beats-{baseline} {share} must lie between 0 and 1")
    if dense is not None and not frontier:
        raise UserError(f"eval: --dense {dense} needs --frontier, which draws it")
    if scoring.tasks or frontier:
        for baseline in gains:
            raise UserError(
                f"eval: --beats-{baseline} judges held-out text by depth, without --tasks"
            )
        if frontier and ema:
            raise UserError("eval: --frontier draws the weights of training; leave out --ema")
        _tasks(run, stage, scoring.options(frontier=frontier, ema=ema), dense)
        return
    scoring.refuse_flags_of_tasks()

    from titan_loop.analysis.report_tables import depth_table
    from titan_loop.evaluation.depth_report import require_gain
    from titan_loop.evaluation.evaluate_run import evaluate_run
    from titan_loop.evaluation.share_work import join_ranks
    from titan_loop.runs.recipe_folder import chosen_run
    from titan_loop.runs.saved_run import SavedRun

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    path = chosen_run(run, stage)
    report = evaluate_run(
        path,
        depths=scoring.depths or DEPTHS,
        windows=scoring.windows,
        sources=scoring.sources,
        seq_len=scoring.seq_len,
        ema=ema,
    )
    if join_ranks()[0] == 0:
        print(depth_table(report))
        print(f"The report is in {SavedRun.open(path).directory.evaluations}")
    for baseline, share in gains.items():
        require_gain(report, share, baseline=baseline)


def _tasks(run: Path, stage: str | None, options: "TaskOptions", dense: Path | None = None) -> None:
    from titan_loop.analysis.frontier import dense_reports, frontier_table, write_frontier
    from titan_loop.analysis.report_tables import task_table
    from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
    from titan_loop.evaluation.share_work import join_ranks
    from titan_loop.runs.recipe_folder import chosen_run
    from titan_loop.runs.saved_run import SavedRun

    _quiet_logs()
    run = chosen_run(run, stage)
    if dense is not None:
        dense_reports(dense)  # its mistakes, before work starts
    report = evaluate_tasks(run, options)
    if join_ranks()[0] == 0:
        run_directory = SavedRun.open(run).directory
        if options.frontier:
            written = write_frontier(report, run_directory, dense)
            if written:
                print(frontier_table(written.points))
                print(f"The frontier is in {written.csv} and {written.png}")
        else:
            print(task_table(report, {task.name: task.metric for task in options.tasks}))
        print(f"The report is {report.path(run_directory)}")
    if report.failures:
        names = ", ".join(report.failures)
        raise RunFailedError(f"{len(report.failures)} tasks have no result: {names} (why: above)")


def watch(
    run: Path,
    scoring: Scoring,
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
        scoring: Depths, tasks and settings.
        once: Stop when nothing is left to evaluate.
        interval: Seconds between two looks.
        wandb: Also log to the training run's W&B.
        retry: Ask checkpoints again of which a task failed before.
    """
    options = scoring.options()

    from titan_loop.evaluation.watch import Watcher

    _quiet_logs()
    watcher = Watcher(run, options, wandb=wandb, retry=retry)
    watcher.run(once=once, interval_seconds=interval)
    if watcher.incomplete:
        steps = ", ".join(str(step) for step in watcher.incomplete)
        raise RunFailedError(f"{run}: steps {steps} lack results (why: above)")


def _quiet_logs() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for name in ("datasets", "huggingface_hub", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
