"""Results of tasks on one checkpoint under one or more readings, as one JSON file.

`evals/tasks-step-N.json` of the run directory:

    step, tokens, trained_recurrent_steps, manifest_sha256, kv_cache
    tasks      name -> reading -> {"metrics": {name: value}, "mean_steps": …, "settings": …}
    failures   name -> reason for having no result
    skipped    name of a suite's task -> reason for skipping it

Metrics have the harness' names, such as `acc,none`; the 95 % interval of a metric m is `m_low` to
`m_high`, its standard error `m_stderr,…`. `answer_bits_per_byte` is the mean over the questions of
(nats of the right answer) / (ln 2 · its UTF-8 bytes). Settings are the windows, documents, shots,
context and dtype that a result was asked with. Writing again adds tasks and readings to the file. A
result replaces an older one unless its sample is smaller. It also replaces the task's results that
were asked otherwise (another text, context, …), and with another manifest or K-V cache all are
replaced.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_loop.errors import listed
from titan_loop.evaluation.intervals import Interval, of_questions
from titan_loop.evaluation.offline_tasks import HELD_OUT
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import (
    DamagedFileError,
    count,
    number,
    read_json_object,
    write_json,
)

logger = logging.getLogger(__name__)

_FIX = "evaluate again"
_SHOWN = 3
_SIZES = re.compile(r"(?:windows|limit)=(\d+|None)")


@dataclass(kw_only=True)
class ReadingResult:
    """Metrics of one reading of one task, and its mean recurrent steps per scored token, if any.

    Attributes:
        settings: Settings that it was asked with; empty for a model in training.
        units: Bytes and nats of every held-out document, as two texts of numbers, at a static
            depth; with them, depths and runs are compared on the same documents.
    """

    metrics: dict[str, float]
    mean_steps: float | None = None
    settings: str = ""
    units: list[str] = field(default_factory=list)

    def samples_less_than(self, other: "ReadingResult") -> bool:
        """Whether it read fewer windows or documents."""
        mine, others = (_SIZES.findall(result.settings) for result in (self, other))
        return any(
            (math.inf if less == "None" else int(less))
            < (math.inf if more == "None" else int(more))
            for less, more in zip(mine, others, strict=False)
        )

    def asks_as(self, other: "ReadingResult") -> bool:
        """Whether it was asked the same, of however many windows or documents."""
        mine, others = (_SIZES.sub("", result.settings) for result in (self, other))
        return mine == others


Results = dict[str, dict[str, ReadingResult]]
"""Task → reading → result."""

HEADLINES = ("acc_norm,none", "acc,none", "bits_per_byte", "bits_per_byte,none")


def headline(metrics: Mapping[str, float], preferred: str | None = None) -> str:
    """Return the metric to show first: the preferred one, the usual ones, or the first there is."""
    assert metrics, "a result without metrics"
    return next(name for name in (preferred or "", *HEADLINES, *metrics) if name in metrics)


def interval(metrics: Mapping[str, float], metric: str) -> Interval:
    """Return a metric with its 95 % interval, or the interval that its standard error gives.

    A metric with neither has an interval without width; a missing metric is NaN.
    """
    value = metrics.get(metric, math.nan)
    name, comma, kind = metric.partition(",")
    error = metrics.get(f"{name}_stderr{comma}{kind}", 0.0)
    low = metrics.get(f"{metric}_low", value - 1.96 * error)
    return Interval(value, low, metrics.get(f"{metric}_high", value + 1.96 * error))


def bits(found: Sequence[float]) -> dict[str, float]:
    """Return bits per byte with the ends of its interval as metrics."""
    names = ("bits_per_byte", "bits_per_byte_low", "bits_per_byte_high")
    return dict(zip(names, found, strict=True))


def graded(metric: str, share: float, questions: int) -> dict[str, float]:
    """Return a share of right answers as a metric with its 95 % interval."""
    value, low, high = of_questions(share, questions)
    return {metric: value, f"{metric}_low": low, f"{metric}_high": high}


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of this metric is the better one."""
    if metric.partition(",")[0] in ("brier_score", "likelihood_diff", "ter"):
        return True
    return any(word in metric for word in ("bits_per_byte", "perplexity"))


def unit_texts(n_bytes: Sequence[float], nats: Sequence[float]) -> list[str]:
    """Return `ReadingResult.units`."""
    return [" ".join(map(str, sums)) for sums in (n_bytes, nats)]


def unit_numbers(texts: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the bytes and the nats of `unit_texts`; raise `ValueError` for other texts."""
    n_bytes, nats = ([float(word) for word in text.split()] for text in texts)
    if len(n_bytes) != len(nats):
        raise ValueError(f"{len(n_bytes)} documents have bytes and {len(nats)} nats")
    return n_bytes, nats


@dataclass(kw_only=True)
class TaskReport:
    """Tasks on one checkpoint, with the fields of the file.

    Attributes:
        manifest_sha256: Hash of the checkpoint's manifest; empty for a model in training.
        ema: Whether the average of the weights was scored; such a report has a file of its own.
    """

    step: int
    tokens: int
    trained_recurrent_steps: int
    manifest_sha256: str
    kv_cache: str = "full"
    tasks: Results = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ema: bool = False

    def path(self, run_directory: RunDirectory) -> Path:
        """Return the path of its file."""
        kind = "tasks-ema" if self.ema else "tasks"
        return run_directory.evaluations / f"{kind}-step-{self.step}.json"

    def save(self, run_directory: RunDirectory) -> Path:
        """Write the file, keeping other tasks and readings of the same checkpoint and cache."""
        path = self.path(run_directory)
        merged = self
        if path.exists():
            before = TaskReport.load(path)
            alike = before.kv_cache == self.kv_cache or not self.tasks  # a failure costs no result
            if alike and before.manifest_sha256 == self.manifest_sha256:
                merged = before._with(self, path)
            else:
                logger.warning(
                    f"{path}: replaced all results, which were of kv_cache={before.kv_cache} or "
                    "another checkpoint of this step"
                )
        write_json(path, asdict(merged))
        return path

    def _with(self, newer: "TaskReport", path: Path) -> "TaskReport":
        for name, readings in newer.tasks.items():
            known = self.tasks.setdefault(name, {})
            for reading, result in readings.items():
                if reading in known and result.samples_less_than(known[reading]):
                    logger.warning(
                        "%s, %s: %s keeps the older result, whose sample is larger (%s; now %s); "
                        "delete the file to begin anew",
                        *(name, reading, path, known[reading].settings, result.settings),
                    )
                    continue
                others = [old for old, before in known.items() if not result.asks_as(before)]
                for old in others:  # of another text or context: no sweep with this one
                    del known[old]
                if others:
                    logger.warning(
                        f"{name}: removed {listed(others, _SHOWN)} from {path}, asked with other "
                        f"settings than {result.settings}"
                    )
                known[reading] = result
            for asked in (name, name.partition("/")[0]):  # held_out answers as held_out/SOURCE
                self.failures.pop(asked, None)
                self.skipped.pop(asked, None)
        self.failures.update(newer.failures)
        self.skipped.update(newer.skipped)
        return self

    @classmethod
    def load(cls, path: Path) -> "TaskReport":
        """Read a file that `save` wrote; raise `UserError` if it is damaged."""
        record = read_json_object(path, fix=_FIX)
        try:
            of_tasks = record.pop("settings", {})  # where 0.1.0 wrote them
            record["tasks"] = {
                name: {
                    reading: _result(**{"settings": of_tasks.get(name, ""), **result})
                    for reading, result in readings.items()
                }
                for name, readings in record["tasks"].items()
            }
            for name in ("step", "tokens", "trained_recurrent_steps"):
                count(record[name])
            return cls(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(path, repr(error), _FIX) from error

    @classmethod
    def all_of(cls, run_directory: RunDirectory, *, ema: bool = False) -> list["TaskReport"]:
        """Return the reports of a run by increasing step, or of its averaged weights."""
        marks = "-ema" if ema else ""
        found: dict[int, TaskReport] = {}
        for kind, read in (("depth", _of_depths), ("tasks", cls.load)):
            for path in run_directory.evaluations.glob(f"{kind}{marks}-step-*.json"):
                report = read(path)
                if report.step in found:
                    report.tasks = {**found[report.step].tasks, **report.tasks}
                found[report.step] = report
        return [found[step] for step in sorted(found)]

    def summary(self) -> str:
        """Return one metric of every task at every reading, in one line."""
        parts = []
        for name, readings in self.tasks.items():
            metric = headline(next(iter(readings.values())).metrics, "acc,none")
            values = [
                f"{reading.replace('static:', 'R=')} {result.metrics[metric]:.3f}"
                for reading, result in readings.items()
                if metric in result.metrics
            ]
            parts.append(" ".join([name, metric.removesuffix(",none"), *values]))
        return "; ".join(parts)

    def flat(self) -> dict[str, float]:
        """Return `task/metric/reading` → value, and `task/mean_steps/reading`."""
        numbers: dict[str, float] = {}
        for name, readings in self.tasks.items():
            for reading, result in readings.items():
                for metric, value in result.metrics.items():
                    numbers[f"{name}/{metric}/{reading}"] = value
                if result.mean_steps is not None:
                    numbers[f"{name}/mean_steps/{reading}"] = result.mean_steps
        return numbers


def _result(
    metrics: Mapping[str, Any],
    mean_steps: float | None = None,
    settings: str = "",
    units: Sequence[str] = (),
) -> ReadingResult:
    """Return a result that a file holds; raise `TypeError` or `ValueError` if it is damaged."""
    if units:
        unit_numbers(units)
    return ReadingResult(
        settings=settings,
        metrics={name: number(value) for name, value in metrics.items()},
        mean_steps=None if mean_steps is None else number(mean_steps),
        units=[*units],
    )


def _of_depths(path: Path) -> TaskReport:
    """Read a `depth-step-N.json`, where 0.1.0 wrote held-out text by depth."""
    record = read_json_object(path, fix=_FIX)
    try:
        report = TaskReport(
            step=count(record["step"]),
            tokens=count(record["tokens"]),
            trained_recurrent_steps=count(record["trained_recurrent_steps"]),
            manifest_sha256="",
            ema=record["ema"],
        )
        for name, source in record["sources"].items():
            sums = source["units"]
            readings = report.tasks[f"{HELD_OUT}/{name}"] = {}
            for depth, found in source["depths"].items():
                units = unit_texts(sums["n_bytes"], sums["nats"][depth])
                readings[f"static:{depth}"] = _result(bits(found), float(depth), units=units)
            for baseline, value in source["baselines"].items():
                readings[baseline] = _result({"bits_per_byte": value})
        return report
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(path, repr(error), _FIX) from error
