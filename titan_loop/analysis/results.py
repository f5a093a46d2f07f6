"""Results of finished runs: a small JSON file for each, and tables and plots of many.

    run ─ results add ─► results/RECIPE/STAGE-seedS.json ─ results show ─► tables beside a paper's

A recipe's module declares `TABLES`: recipe name → `ResultTable`s, which hold the paper's numbers.
The result files are committed beside the module; runs are not.
"""

import logging
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from titan_loop.errors import UserError
from titan_loop.evaluation.bits_per_byte import paired_difference
from titan_loop.evaluation.evals_log import EVALS_FIELDS, WHILE_TRAINING
from titan_loop.evaluation.intervals import Interval, of_seeds
from titan_loop.evaluation.task_report import TaskReport, unit_numbers
from titan_loop.runs.run_directory import RunDirectory, is_clean
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import (
    DamagedFileError,
    count,
    number,
    read_json_object,
    read_jsonl,
    write_json,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MOST_LOSSES = 40
_REPORTED_BY = ("task", "stratum", "metric", "reading")
_PLACES = ("--stage", "--dump-folder")
"""Flags that select a stage and its folder; a result does not list them as overrides."""

Where: TypeAlias = Mapping[str, str]
"""Part of a number's address: `stage`, and `task`, `stratum` (if the task has several),
`metric` and `reading`, which together make the name that an evaluation reports."""
Estimate: TypeAlias = tuple[Interval, int]
"""A mean with its interval, and the number of seeds."""
UNCLEAN = "†"


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table of results, with the paper's numbers beside them.

    A cell's address is the union of `everywhere`, its row and its column. If row and column both
    have a `stage`, the cell's stage is ROW_COLUMN.

    Attributes:
        everywhere: Common part of all addresses.
        paper: Row → column → the paper's number.
        columns_are: Label of the plot's horizontal axis if the columns are ordered, otherwise "".
        factor: Multiplier of the shown numbers: 100 shows shares in per cent.
        less: Baseline row, if any; a second table shows how far the other rows are from it.
        against_flops: Column that is also drawn against the training FLOPs of its runs, if any.
        message: Title of the plots, in which {ROW|COLUMN} is replaced by that cell's mean; by
            default the table's title.
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
    less: str = ""
    against_flops: str = ""
    message: str = ""

    def values(self, results: Sequence["RunResult"], row: str, column: str) -> dict[int, float]:
        """Return seed → a cell's number times `factor`, for every run that has the number."""
        name, runs = self.runs(results, row, column)
        return {run.seed: self.factor * run.results[name] for run in runs}

    def mean(self, results: Sequence["RunResult"], row: str, column: str) -> Estimate | None:
        """Return a cell's mean with its interval over seeds, and the number of seeds, if any.

        Cells are compared on the same documents and questions, so the interval leaves out the error
        of sampling them. The interval of a percentage is clipped to 0 and 100.
        """
        values = self.values(results, row, column)
        if not values:
            return None
        found = of_seeds([*values.values()])
        if self.factor == 100.0:
            found = Interval(found.value, max(found.low, 0.0), min(found.high, self.factor))
        return found, len(values)

    def has_any(self, results: Sequence["RunResult"]) -> bool:
        """Return whether any cell has a number."""
        cells = ((row, column) for row in self.rows for column in self.columns)
        return any(self.runs(results, *cell)[1] for cell in cells)

    def difference(self, results: Sequence["RunResult"], row: str, column: str) -> Estimate | None:
        """Return a cell minus its column's in the row `less`, and the number of seeds with both.

        On held-out text the interval covers seeds and documents, otherwise only seeds. None if no
        seed has both cells, or if their documents differ or were recorded for only some of them.
        """
        cells: list[dict[int, tuple[float, list[str]]]] = []
        for label in (row, self.less):
            name, runs = self.runs(results, label, column)
            cells.append({r.seed: (r.results[name], r.units.get(name, [])) for r in runs})
        own, other = cells
        pairs = [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]
        if not pairs:
            return None
        sums = [unit_numbers(texts) for pair in pairs for _, texts in pair if texts]
        if not sums:
            found = of_seeds([first - second for (first, _), (second, _) in pairs])
        elif len(sums) < 2 * len(pairs) or any(n_bytes != sums[0][0] for n_bytes, _ in sums):
            return None
        else:
            nats = [each for _, each in sums]  # alternates between the two rows
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
    """The result of a finished run, with the fields of its JSON file.

    Attributes:
        stage: Name of the stage; the recipe's name for a recipe of one run.
        overrides: Flags after the recipe's name, except --stage and --dump-folder.
        commit: `git describe` of the code that trained it, of an unclean start if there was one;
            None outside a checkout.
        machine: Where the result was added, in words.
        seconds: Duration of training, without evaluation.
        flops: Model FLOPs of training on all ranks, without recomputation; None if not recorded.
        losses: [step, loss] pairs, spread evenly, the last one included.
        results: TASK/METRIC/READING → value at the newest evaluated step; ",ema" marks averaged
            weights.
        task: Parameters of the generated task that it was trained on; empty for text.
        units: TASK/METRIC/READING → the bytes and the nats of every held-out document, two strings
            of numbers; with them, runs can be compared on the same documents.
        unclean: Whether the code had uncommitted changes, or its commit is not in the history.
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
    evaluations: list[list[Any]] = field(default_factory=list)  # older files have some
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
        """Return the result of a run; raise `UserError` unless `titan-loop train` trained it."""
        started = run.read_run()
        starts = [started, *started["restarts"]]
        commits = [start.get("commit") for start in starts]
        commit = next((each for each in commits if not is_clean(each)), commits[-1])
        recipe, overrides = _recipe_of(started["command"])
        for restart in started["restarts"]:
            name, flags = _recipe_of(restart["command"])
            # `train RUN` goes on with the run's own settings.
            overrides = flags if name == recipe else [*overrides, *flags]
        records = run.read_metrics()
        if not records:
            raise UserError(f"{run.path} has no metrics.jsonl; train it first")
        config = SavedRun(run.path).config
        last, spans = records[-1], list(_intervals(records))
        step, results = _results(run)
        if 0 < step < last["step"]:
            logger.warning(
                f"{run.path}: the results are of step {step}, the run was trained to step "
                f"{last['step']}; evaluate its last checkpoint with titan-loop eval, then add it"
            )
        return cls(
            recipe=recipe,
            stage=config.get("stage") or short_name(recipe),
            seed=config["debug"]["seed"] or 0,
            overrides=overrides,
            commit=commit,
            machine=machine(),
            versions=starts[-1]["versions"],
            tokens=last["tokens"],
            steps=last["step"],
            seconds=round(sum(n / (r.get("tokens_per_second") or math.inf) for n, r in spans), 1),
            losses=[  # null stands for a loss that was not finite
                [r["step"], round(r["loss"], 5)] for r in _thinned(records) if r["loss"] is not None
            ],
            results=dict(sorted(results.items())),
            task=config.get("dataloader", {}).get("task", {}),
            units=_units(run, step),
            flops=total_flops(records),
            unclean=not is_clean(commit),
        )

    @classmethod
    def all_of(cls, folder: Path) -> list["RunResult"]:
        """Return the results saved in the folder of a recipe."""
        fix, found = "write it again with titan-loop results add RUN", []
        for path in sorted(folder.glob("*-seed*.json")):
            record = read_json_object(path, fix=fix)
            try:
                result = cls(**record)
                for value in (*result.results.values(), result.flops or 0.0):
                    number(value)
                for texts in result.units.values():
                    unit_numbers(texts)
                found.append(result)
            except (TypeError, ValueError, AttributeError) as error:
                raise DamagedFileError(path, str(error), fix) from error
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
    if recipe.endswith(".json"):
        raise UserError(f"the run repeats {recipe}, which has no tables: add the run beside it")
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


def total_flops(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the training FLOPs behind the records of a run; None for an older version's."""
    if not all(record.get("flops_per_token") for record in records):
        return None  # an older run
    return sum(tokens * record["flops_per_token"] for tokens, record in _intervals(records))


def _intervals(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = [0, *(record["tokens"] for record in records)]
    for record, tokens in zip(records, before, strict=False):
        yield record["tokens"] - tokens, record


def _thinned(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    stride = max(1, -(-len(records) // _MOST_LOSSES))
    return records[(len(records) - 1) % stride :: stride]


def _evaluated(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the evaluations while training, one per step; where a step repeats, the later wins."""
    records = read_jsonl(run.evals_jsonl, EVALS_FIELDS)
    kept: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["asked"] == WHILE_TRAINING:
            before = kept.get(record["step"], {"results": {}})
            kept[record["step"]] = {**record, "results": before["results"] | record["results"]}
    return [kept[step] for step in sorted(kept)]


def _results(run: RunDirectory) -> tuple[int, dict[str, float]]:
    """Return the newest evaluated step and its results; sources read later below win."""
    found = [(record["step"], record["results"]) for record in _evaluated(run)]
    found += [(report.step, report.flat()) for report in TaskReport.all_of(run)]
    for report in TaskReport.all_of(run, ema=True):
        averaged = {f"{name},ema": value for name, value in report.flat().items()}
        found.append((report.step, averaged))
    for path in sorted(run.evaluations.glob("*-step-*.json")):
        found += _of_analysis(path)
    newest = max((step for step, _ in found), default=0)
    return newest, {
        name: value for step, results in found if step == newest for name, value in results.items()
    }


def _units(run: RunDirectory, step: int) -> dict[str, list[str]]:
    """Return the documents' sums at the step of the results, which they belong to."""
    return {
        f"{task}/bits_per_byte/{reading}{end}": result.units
        for end, ema in (("", False), (",ema", True))
        for report in TaskReport.all_of(run, ema=ema)
        if report.step == step
        for task, readings in report.tasks.items()
        for reading, result in readings.items()
        if result.units
    }


def _of_analysis(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return [(step, results)] from the record of an analysis, [] if it has no results."""
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
            published = (table.paper[row].get(column) for column in table.columns)
            cells = ("" if value is None else f"{value:.{table.digits}f}" for value in published)
            rows.append([f"{row}, paper", *cells])
    return _markdown(rows)


def differences_text(table: ResultTable, results: Sequence[RunResult]) -> str:
    """Return the differences from the row `less` in Markdown; "" if nothing can be compared."""
    rows = [[f"{table.title}, less {table.less}", *table.columns]]
    for row in table.rows:
        found = [table.difference(results, row, column) for column in table.columns]
        if row != table.less and any(found):
            rows.append([row, *_estimates(found, f"+.{table.digits}f")])
    return _markdown(rows) if len(rows) > 1 else ""


def runs_text(results: Sequence[RunResult]) -> str:
    """Return a Markdown table of the runs: length, cost, last loss and commit."""
    rows = [["run", "seed", "steps", "tokens", "FLOPs", "seconds", "last loss", "commit"]]
    for r in sorted(results, key=lambda result: (result.stage, result.seed)):
        flops = f"{r.flops:.2e}" if r.flops else "-"
        costs = f"{r.steps:,}", f"{r.tokens:,}", flops, f"{r.seconds:,.0f}"
        commit = (r.commit or "-") + f" {UNCLEAN}" * r.unclean
        loss = f"{r.losses[-1][1]:.4g}" if r.losses else "-"  # none was finite
        rows.append([r.stage, str(r.seed), *costs, loss, commit])
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
