"""`titan-loop eval`: bits per byte by depth, tasks under every reading, the checkpoint watcher."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.cli.parser import Parser
from titan_loop.errors import EXIT_OK, RunFailedError, UserError

if TYPE_CHECKING:
    from titan_loop.evaluation.evaluate_tasks import TaskOptions

DEPTHS = (1, 2, 3, 4, 5, 6)
DTYPES = ("float32", "bfloat16", "float64")


def run(arguments: Sequence[str]) -> int:
    """Evaluate, print tables and say where the reports are."""
    if arguments[:1] == ["watch"]:
        return _watch(arguments[1:])
    parser = _parser()
    given = parser.parse(arguments)
    if given.beats_unigram is not None and not 0 < given.beats_unigram < 1:
        raise UserError(f"eval: --beats-unigram {given.beats_unigram} must lie between 0 and 1")
    if given.tasks or given.frontier:
        if given.beats_unigram is not None:
            raise UserError("eval: --beats-unigram judges held-out text by depth, without --tasks")
        return _tasks(given)
    _refuse_flags_of_tasks(parser, given)

    from titan_loop.analysis.tables import depth_table
    from titan_loop.evaluation.depth_report import require_gain
    from titan_loop.evaluation.evaluate_run import evaluate_run
    from titan_loop.runs.run_directory import RunDirectory

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_directory = RunDirectory(given.run)
    depths = given.depths or list(DEPTHS)
    report = evaluate_run(run_directory, depths=depths, windows=given.windows)
    print(depth_table(report))
    print(f"The report is in {run_directory.evaluations}")
    if given.beats_unigram is not None:
        require_gain(report, given.beats_unigram)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        "eval",
        "Score a checkpoint. Without --tasks: held-out text at several depths, beside a unigram "
        "and a bigram model fitted on the tokens it has read. `eval watch RUN` evaluates every "
        "new checkpoint of a run.",
    )
    parser.add_argument("run", help="a run directory; with --tasks also a checkpoint's folder")
    parser.add_argument(
        "--frontier", action="store_true", help="every depth and every exit policy at many settings"
    )
    parser.add_argument(
        "--beats-unigram",
        type=float,
        metavar="SHARE",
        help="fail unless held-out bits per byte are this share below the unigram model's",
    )
    _add_task_flags(parser)
    return parser


def _refuse_flags_of_tasks(parser: Parser, given: argparse.Namespace) -> None:
    """Raise for flags that change nothing in an evaluation of held-out text by depth."""
    has_effect = ("run", "depths", "windows", "beats_unigram")
    for name, value in vars(given).items():
        if name not in has_effect and value != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"eval: {flag}{'' if value is True else f' {value}'} needs --tasks; without them, "
                "held-out text is scored at the --depths"
            )


def _add_task_flags(parser: Parser) -> None:
    parser.add_argument(
        "--depths", type=int, nargs="+", help="recurrent steps to score, all in one pass"
    )
    parser.add_argument(
        "--windows", type=int, default=64, help="held-out windows per source, always the same ones"
    )
    parser.add_argument(
        "--tasks",
        action="append",
        help="tasks of lm-evaluation-harness, or suites (ouro_base, depth, offline), with commas",
    )
    parser.add_argument("--num-fewshot", type=int, help="replaces the examples each task has")
    parser.add_argument("--limit", type=int, help="documents a task, for a first look")
    parser.add_argument("--recurrent-steps", type=int, help="R; by default that of training")
    parser.add_argument(
        "--exit", default="full", help="full, static:S, hidden:EPSILON, q:THRESHOLD or kl:KL,NATS"
    )
    parser.add_argument("--kv-cache", default="full", help="of generated tokens")
    parser.add_argument("--batch-size", type=int, default=8, help="rows at a time")
    parser.add_argument("--max-length", type=int, help="context; by default the trained window")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokenizer", help="a tokenizer.json; by default that of the source")
    parser.add_argument("--include-path", type=Path, help="a folder of harness tasks of your own")
    parser.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="run, without a sandbox, the programs that the model writes in code tasks",
    )
    parser.add_argument("--no-cache", action="store_true", help="score every request again")


def _options(given: argparse.Namespace, tasks: list[str], *, frontier: bool) -> "TaskOptions":
    from titan_loop.evaluation.evaluate_tasks import TaskOptions
    from titan_loop.evaluation.suites import DEPTH_SUITE_STEPS, expand_tasks

    says_how = frontier or given.exit != "full" or given.recurrent_steps is not None
    sweeps = "depth" in tasks and not says_how
    return TaskOptions(
        tasks=expand_tasks(tasks, given.num_fewshot),
        recurrent_steps=given.recurrent_steps,
        exit=given.exit,
        depths=given.depths or (DEPTH_SUITE_STEPS if sweeps else ()),
        frontier=frontier,
        kv_cache=given.kv_cache,
        windows=given.windows,
        limit=given.limit,
        batch_size=given.batch_size,
        max_length=given.max_length,
        dtype=given.dtype,
        tokenizer=given.tokenizer,
        include_path=given.include_path,
        cache=not given.no_cache,
        confirm_run_unsafe_code=given.confirm_run_unsafe_code,
    )


def _names(given: argparse.Namespace) -> list[str]:
    parts = [name.strip() for text in given.tasks or ["held_out"] for name in text.split(",")]
    return [name for name in parts if name]


def _tasks(given: argparse.Namespace) -> int:
    """Evaluate tasks of one checkpoint."""
    options = _options(given, _names(given), frontier=given.frontier)

    from titan_loop.analysis.frontier import frontier_table, write_frontier
    from titan_loop.analysis.tables import task_table
    from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
    from titan_loop.evaluation.ranks import join_ranks
    from titan_loop.runs.saved_run import SavedRun

    _quiet_logs()
    rank, _ = join_ranks()
    report = evaluate_tasks(given.run, options)
    if rank == 0:
        run_directory = SavedRun.open(given.run).directory
        if given.frontier:
            written = write_frontier(report, run_directory)
            if written:
                print(frontier_table(written.points))
                print(f"The frontier is in {written.csv} and {written.png}")
        else:
            print(task_table(report, {task.name: task.metric for task in options.tasks}))
        print(f"The report is {report.path(run_directory)}")
    if report.failures:
        names = ", ".join(report.failures)
        raise RunFailedError(f"{len(report.failures)} tasks have no result: {names} (why: above)")
    return EXIT_OK


def _watch(arguments: Sequence[str]) -> int:
    """Evaluate each new checkpoint of a run."""
    parser = Parser(
        "eval watch",
        "Evaluate every checkpoint of a run once, as it appears, until the run is complete. "
        "Several watchers of one run share the work; any may be killed and started again.",
    )
    parser.add_argument("run", help="the run directory; it need not exist yet")
    parser.add_argument("--once", action="store_true", help="end when nothing is left to evaluate")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between two looks")
    parser.add_argument("--wandb", action="store_true", help="log to the training run's W&B, too")
    _add_task_flags(parser)
    given = parser.parse(arguments)
    options = _options(given, _names(given), frontier=False)

    from titan_loop.evaluation.watch import Watcher

    _quiet_logs()
    watcher = Watcher(Path(given.run), options, wandb=given.wandb)
    watcher.run(once=given.once, interval_seconds=given.interval)
    if watcher.incomplete:
        steps = ", ".join(str(step) for step in watcher.incomplete)
        raise RunFailedError(f"{given.run}: steps {steps} lack results (why: above)")
    return EXIT_OK


def _quiet_logs() -> None:
    """Show what titan_loop says, and of the harness only what went wrong."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for name in ("datasets", "huggingface_hub", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
