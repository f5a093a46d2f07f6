"""Results of finished runs: a small JSON file for each, and tables and plots of many.

    run ─ results add ─► results/RECIPE/STAGE-seedS.json ─ results show ─► tables beside a paper's

A recipe's module declares its tables as `TABLES`: name of a recipe → `ResultTable`s, the paper's
numbers among their data. The files stand beside the module and are committed; runs are not.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from titan_loop.analysis.document_units import depth_reports, held_out_name, numbers, units_of
from titan_loop.errors import UserError
from titan_loop.evaluation.bits_per_byte import paired_difference
from titan_loop.evaluation.evals_log import EVALS_FIELDS, WHILE_TRAINING
from titan_loop.evaluation.intervals import Interval, of_seeds
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.runs.run_directory import RunDirectory, is_clean
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import count, number, read_json_object, read_jsonl, write_json
from titan_loop.storage.regular_file import DamagedFileError

FORMAT_VERSION = 1
_MOST_LOSSES = 40
_MOST_EVALUATIONS = 20
_REPORTED_BY = ("task", "stratum", "metric", "reading")
_PLACES = ("--stage", "--dump-folder")
"""Flags that name a run without changing it."""

Where: TypeAlias = Mapping[str, str]
"""Part of the address of a number: its `stage`, and `task`, `stratum` (where the task has several),
`metric` and `reading`, by which an evaluation reports it."""
Estimate: TypeAlias = tuple[Interval, int]
"""A mean with its interval, and the number of seeds."""
UNCLEAN = "†"


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table of results, and the paper's beside it.

    A cell is the number that `everywhere`, its row and its column address together. Where row and
    column both have a `stage`, the cell's is ROW_COLUMN.

    Attributes:
        name: Name of the plot's file, after the recipe's.
        everywhere: Common part of all addresses.
        paper: Row → column → the paper's number.
        columns_are: Label of the plot's horizontal axis, over which ordered columns stand.
        factor: Unit of the shown numbers: 100 for per cent.
        over_training: Columns that are also drawn over the steps of training.
        less: Row that the others are compared with, if any: a second table has the differences.
        against_flops: Column that is also drawn against the training FLOPs of its runs, if any.
        headline: Row or column whose best mean is the plot's title; default the last column.
        message: Title instead, with {ROW|COLUMN} for the mean of a cell.
        in_color: At most six rows; the others are grey. Default the first six.
    """

    name: str
    title: str
    rows: Mapping[str, Where]
    columns: Mapping[str, Where]
    everywhere: Where = field(default_factory=dict)
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    columns_are: str = ""
    factor: float = 100.0
    digits: int = 1
    over_training: Sequence[str] = ()
    less: str = ""
    against_flops: str = ""
    headline: str = ""
    message: str = ""
    in_color: Sequence[str] = ()

    def values(self, results: Sequence["RunResult"], row: str, column: str) -> dict[int, float]:
        """Return the number of a cell in every run that has it, times the factor, by seed."""
        name, runs = self.runs(results, row, column)
        return {run.seed: self.factor * run.results[name] for run in runs}

    def mean(self, results: Sequence["RunResult"], row: str, column: str) -> Estimate | None:
        """Return a cell's mean with its interval over seeds, and their number; None without any.

        Documents and questions are the same in all cells, so their sampling is left out here; a
        percentage stays between 0 and 100.
        """
        values = self.values(results, row, column)
        if not values:
            return None
        found = of_seeds([*values.values()])
        if self.factor == 100.0:
            found = Interval(found.value, max(found.low, 0.0), min(found.high, self.factor))
        return found, len(values)

    def costs(self, results: Sequence["RunResult"], row: str, column: str) -> list[float]:
        """Return the training FLOPs of the runs that have a cell's number, where recorded."""
        return [run.flops for run in self.runs(results, row, column)[1] if run.flops]

    def has_any(self, results: Sequence["RunResult"]) -> bool:
        """Return whether a cell has a number."""
        return any(
            self.runs(results, row, column)[1] for row in self.rows for column in self.columns
        )

    def curves(
        self, results: Sequence["RunResult"], row: str, column: str
    ) -> Iterator[list[tuple[int, float]]]:
        """Yield (step, number) pairs of a cell over the training of every run that has it."""
        name, runs = self.runs(results, row, column)
        for run in runs:
            found = [(step, numbers[name]) for step, numbers in run.evaluations if name in numbers]
            yield [(step, self.factor * number) for step, number in found]

    def difference(self, results: Sequence["RunResult"], row: str, column: str) -> Estimate | None:
        """Return a cell minus the row `less`'s, over the seeds that both have, and their number.

        On held-out text the interval covers seeds and documents, otherwise seeds. None where no
        seed has both, or where they read different documents.
        """
        cells: list[dict[int, tuple[float, list[str]]]] = []
        for label in (row, self.less):
            name, runs = self.runs(results, label, column)
            cells.append({r.seed: (r.results[name], r.units.get(name, [])) for r in runs})
        own, other = cells
        pairs = [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]
        if not pairs:
            return None
        sums = [numbers(texts) for pair in pairs for _, texts in pair if texts]
        if not sums:
            found = of_seeds([first - second for (first, _), (second, _) in pairs])
        elif len(sums) < 2 * len(pairs) or any(n_bytes != sums[0][0] for n_bytes, _ in sums):
            return None
        else:
            nats = [each for _, each in sums]
            found = paired_difference(nats[::2], nats[1::2], sums[0][0])
        return Interval(*(self.factor * value for value in found)), len(pairs)

    def runs(
        self, results: Sequence["RunResult"], row: str, column: str
    ) -> tuple[str, list["RunResult"]]:
        """Return the name of a cell's number, and the runs of its stage that have it, by seed."""
        where, name = self.address(row, column)
        stage = where.get("stage")
        found = [r for r in results if stage in (None, r.stage) and name in r.results]
        return name, sorted(found, key=lambda run: run.seed)

    def address(self, row: str, column: str) -> tuple[Where, str]:
        """Return the address of a cell, and the name by which an evaluation reports its number."""
        across, down = self.rows[row], self.columns[column]
        where = {**self.everywhere, **across, **down}
        if "stage" in across and "stage" in down:
            where["stage"] = f"{across['stage']}_{down['stage']}"
        return where, "/".join(where[part] for part in _REPORTED_BY if part in where)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run, with the fields of the file.

    Attributes:
        stage: Name of the stage; the recipe's name for a recipe of one run.
        overrides: Flags after the recipe's name.
        commit: `git describe` of the code that trained it; None outside a checkout.
        seconds: Duration of training, without evaluation.
        flops: Model FLOPs of training, all ranks together; recomputation does not count. None where
            the run has not recorded them.
        losses: [step, loss] pairs, spread evenly over the run, the last one included.
        results: TASK/METRIC/READING → value at the newest step that was evaluated, as in
            `evals.jsonl`, or by an analysis; ",ema" marks averaged weights.
        evaluations: [step, the same] pairs while it trained, spread evenly over the run.
        task: Parameters of the generated task that it was trained on; empty for text.
        units: TASK/METRIC/READING → bytes and nats of every document of held-out text, each a text
            of numbers, so that runs can be compared on the same documents.
        unclean: The code was changed, or its commit is not in the history.
    """

    recipe: str
    stage: str
    seed: int
    overrides: list[str]
    commit: str | None
    machine: str
    versions: dict[str, str]
    tokens: int
    steps: int
    seconds: float
    losses: list[list[float]]
    results: dict[str, float]
    evaluations: list[list[Any]] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    units: dict[str, list[str]] = field(default_factory=dict)
    flops: float | None = None
    unclean: bool = False
    format_version: int = FORMAT_VERSION

    def save(self, folder: Path) -> Path:
        """Write FOLDER/RECIPE/STAGE-seedS.json and return its path."""
        path = folder / short_name(self.recipe) / f"{self.stage}-seed{self.seed}.json"
        write_json(path, asdict(self))
        return path

    @classmethod
    def of(cls, run: RunDirectory) -> "RunResult":
        """Collect the records of a run."""
        started = run.read_run()
        start = [started, *started["restarts"]][-1]
        recipe, overrides = _recipe_of(start["command"])
        records = run.read_metrics()
        if not records:
            raise UserError(f"{run.path} has no metrics.jsonl; train it first")
        config = SavedRun(run.path).config
        last, evaluated = records[-1], _evaluated(run)
        return cls(
            recipe=recipe,
            stage=config.get("stage") or short_name(recipe),
            seed=config["debug"]["seed"] or 0,
            overrides=overrides,
            commit=start.get("commit"),
            machine=machine(),
            versions=start["versions"],
            tokens=last["tokens"],
            steps=last["step"],
            seconds=round(_seconds(records), 1),
            losses=[[r["step"], round(r["loss"], 5)] for r in _thinned(records, _MOST_LOSSES)],
            results=dict(sorted(_results(run, evaluated).items())),
            evaluations=[
                [record["step"], _metrics(record["results"])]
                for record in _thinned(evaluated, _MOST_EVALUATIONS)
            ],
            task=config.get("dataloader", {}).get("task", {}),
            units=units_of(run),
            flops=_flops(records),
            unclean=not is_clean(start.get("commit")),
        )

    @classmethod
    def all_of(cls, folder: Path) -> list["RunResult"]:
        """Return the results saved in the folder of a recipe."""
        found = []
        for path in sorted(folder.glob("*-seed*.json")):
            record = read_json_object(path, fix="write it anew: results add RUN")
            try:
                result = cls(**record)
                for value in (*result.results.values(), result.flops or 0.0):
                    number(value)
                for texts in result.units.values():
                    numbers(texts)
                found.append(result)
            except (TypeError, ValueError, AttributeError) as error:
                raise UserError(f"{path} is damaged ({error}): results add RUN") from error
        if not found:
            raise UserError(f"{folder} has no result; write one with titan-loop results add RUN")
        return found


def short_name(recipe: str) -> str:
    """Return the name of a recipe's function."""
    return recipe.rpartition(":")[2]


def _recipe_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe of `… train RECIPE FLAGS`, and the flags that are not in `_PLACES`."""
    if "train" not in command[:-1]:
        raise UserError(
            f"the run was started by {' '.join(command)!r}, not by titan-loop train RECIPE; train "
            "it that way"
        )
    recipe, *flags = command[list(command).index("train") + 1 :]
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag not in _PLACES:
            kept.append(word)
        elif not equals:
            next(words, None)
    return recipe, kept


def machine() -> str:
    """Return this machine in words: its accelerator, or its cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU with {os.cpu_count()} {platform.machine()} cores"


def _seconds(records: Sequence[Mapping[str, Any]]) -> float:
    speeds = ((tokens, record.get("tokens_per_second")) for tokens, record in _intervals(records))
    return sum(tokens / speed for tokens, speed in speeds if speed)


def _flops(records: Sequence[Mapping[str, Any]]) -> float | None:
    if not all(record.get("flops_per_token") for record in records):
        return None  # an older run
    return sum(tokens * record["flops_per_token"] for tokens, record in _intervals(records))


def _intervals(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = [0, *(record["tokens"] for record in records)]
    for record, tokens in zip(records, before, strict=False):
        yield record["tokens"] - tokens, record


def _thinned(records: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    stride = max(1, -(-len(records) // most))
    return records[(len(records) - 1) % stride :: stride] if records else []


def _evaluated(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the evaluations while it trained; of a repeated step the later one."""
    records = read_jsonl(run.evals_jsonl, EVALS_FIELDS)
    kept: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["asked"] == WHILE_TRAINING:
            before = kept.get(record["step"], {"results": {}})
            kept[record["step"]] = {**record, "results": before["results"] | record["results"]}
    return [kept[step] for step in sorted(kept)]


def _metrics(results: Mapping[str, float]) -> dict[str, float]:
    return {name: round(x, 5) for name, x in results.items() if "/mean_steps/" not in name}


def _results(run: RunDirectory, evaluated: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the results at the newest evaluated step; of several, the latest count."""
    found = [(record["step"], record["results"]) for record in evaluated]
    for report in depth_reports(run):
        bits = {
            held_out_name(report, source, depth): interval.value
            for source, depths in report.sources.items()
            for depth, interval in depths.depths.items()
        }
        found.append((report.step, bits))
    found += [(report.step, report.flat()) for report in TaskReport.all_of(run)]
    for path in sorted(run.evaluations.glob("*-step-*.json")):
        found += _of_analysis(path)
    newest = max((step for step, _ in found), default=0)
    return {
        name: value for step, results in found if step == newest for name, value in results.items()
    }


def _of_analysis(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the step and the results in the record of an analysis; none of other files."""
    fix = "analyse the run again"
    record = read_json_object(path, fix=fix)
    if "results" not in record:
        return []
    try:
        results = {name: number(value) for name, value in record["results"].items()}
        return [(count(record["step"]), results)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(path, repr(error), fix) from error


def table_text(table: ResultTable, results: Sequence[RunResult]) -> str:
    """Return a table in Markdown: means with 95 % intervals over seeds, and the paper's numbers."""
    rows = [[table.title + f", {table.columns_are}" * bool(table.columns_are), *table.columns]]
    for row in table.rows:
        found = [table.mean(results, row, column) for column in table.columns]
        runs = [run for column in table.columns for run in table.runs(results, row, column)[1]]
        mark = f" {UNCLEAN}" * any(run.unclean for run in runs)
        rows.append([row + mark, *_estimates(found, f".{table.digits}f")])
        if row in table.paper:
            told = (table.paper[row].get(column) for column in table.columns)
            cells = ("" if value is None else f"{value:.{table.digits}f}" for value in told)
            rows.append([f"{row}, paper", *cells])
    return _markdown(rows)


def differences_text(table: ResultTable, results: Sequence[RunResult]) -> str:
    """Return differences to the row `less` in Markdown; empty if nothing can be compared."""
    rows = [[f"{table.title}, less {table.less}", *table.columns]]
    for row in table.rows:
        found = [table.difference(results, row, column) for column in table.columns]
        if row != table.less and any(found):
            rows.append([row, *_estimates(found, f"+.{table.digits}f")])
    return _markdown(rows) if len(rows) > 1 else ""


def runs_text(results: Sequence[RunResult]) -> str:
    """Return a Markdown table of the runs themselves."""
    rows = [["run", "seed", "steps", "tokens", "FLOPs", "seconds", "last loss", "commit"]]
    for r in sorted(results, key=lambda result: (result.stage, result.seed)):
        flops = f"{r.flops:.2e}" if r.flops else "-"
        costs = f"{r.steps:,}", f"{r.tokens:,}", flops, f"{r.seconds:,.0f}"
        commit = (r.commit or "-") + f" {UNCLEAN}" * r.unclean
        rows.append([r.stage, str(r.seed), *costs, f"{r.losses[-1][1]:.4g}", commit])
    return _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _estimates(found: Sequence[Estimate | None], form: str) -> Iterator[str]:
    for estimate in found:
        if estimate is None:
            yield "-"
            continue
        interval, seeds = estimate
        value, low, high = (f"{number:{form}}" for number in interval)
        bounds = "" if interval.low == interval.high else f" [{low}, {high}]"
        yield value + bounds + " (1 seed)" * (seeds == 1)
